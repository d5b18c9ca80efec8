"""The built-in objectives: a module and a row of `models.objective` each."""
