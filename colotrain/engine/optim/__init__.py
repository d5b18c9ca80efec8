"""The optimizers, and their step over shards."""
