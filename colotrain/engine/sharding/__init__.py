"""Parameter groups over `fully_shard`, their collectives, and access to its private names."""
