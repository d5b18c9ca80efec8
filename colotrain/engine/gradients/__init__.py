"""Reading gradients by name, and statistics of them."""
