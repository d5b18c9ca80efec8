"""Parameter groups over `fully_shard`, and the door to its private names."""
