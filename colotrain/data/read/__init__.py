"""From token files and users' datasets to batches."""
