"""Data: text files to tokens, tokens to samples, samples in an order that no world size changes."""
