"""Warm server: one process that has imported torch, and processes forked from it."""
