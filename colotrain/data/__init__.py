"""Data: files to tokens, tokens to samples, samples in an order independent of world size."""
