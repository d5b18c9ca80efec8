"""Reading data: from token files and users' datasets to batches."""
