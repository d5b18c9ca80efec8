"""Batch systems that run jobs."""
