"""A run's events as they are written, read and added up."""
