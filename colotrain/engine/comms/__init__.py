"""Process groups, shared memory, and what ranks exchange through them."""
