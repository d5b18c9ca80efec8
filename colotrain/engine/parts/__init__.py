"""What each rank has of the model's tensors, and how ranks join their parts."""
