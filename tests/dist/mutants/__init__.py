"""Workers of `verify` with one contract broken on purpose; each module is run in place of it."""
