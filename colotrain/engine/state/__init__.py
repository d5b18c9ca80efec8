"""The state of a run, and where it is kept: checkpoints on disk and copies in memory."""
