"""The events of a run: writing them, reading them back and summarizing them."""
