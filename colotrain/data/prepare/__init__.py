"""From files to token files in the cache, without torch."""
