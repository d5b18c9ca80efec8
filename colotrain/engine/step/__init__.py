"""The step of a run, and what takes part in it."""
