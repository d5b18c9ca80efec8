"""Charts, tables and text views of a run."""
