"""Reading gradients by name, and what they tell."""
