"""Pipeline parallelism: ranks that hold some of a model's blocks, and pass activations on."""
