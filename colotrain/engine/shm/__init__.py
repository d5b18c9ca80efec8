"""Collectives and parameters in memory that the ranks of a host share."""
