"""Keeps parameters, gradients and optimizer state on the device, on the host or on disk."""
