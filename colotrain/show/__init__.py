"""Every picture and table of a run."""
