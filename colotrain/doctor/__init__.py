"""Checks, before a run, of what could keep it from starting, slow it down or lose its files."""
