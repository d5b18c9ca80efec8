"""Where model data rests: device, host or disk."""
