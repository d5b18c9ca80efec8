"""What is done to a model before it trains: an ordered list of transforms."""
