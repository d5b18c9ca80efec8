"""Checkpoints: pieces, files, manifest, saving and restoring."""
