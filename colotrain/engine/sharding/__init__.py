"""Parameter groups over `fully_shard`, and access to its private names."""
