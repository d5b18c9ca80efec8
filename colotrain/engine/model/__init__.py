"""What a model is: its blocks, frozen parameters, precision and random generators."""
