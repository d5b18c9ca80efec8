"""What verbs do with runs: start, detach, stop, list, sweep, submit."""
