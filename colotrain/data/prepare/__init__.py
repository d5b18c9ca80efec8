"""Preparing data: from users' files to token files in the cache, without torch."""
