"""Planning: from configuration, machine and model to a run plan, without torch."""
