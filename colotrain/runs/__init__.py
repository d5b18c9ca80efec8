"""Commands on runs: start, detach, stop, list, sweep, submit."""
