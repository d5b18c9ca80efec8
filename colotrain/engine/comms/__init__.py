"""Process groups, and what ranks exchange in them."""
