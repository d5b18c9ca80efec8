"""Frozen linear layers that hold packed blocks instead of a weight."""
