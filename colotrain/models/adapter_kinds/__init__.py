"""The kinds of adapters: a module and a row of `models.adapters.KINDS` each."""
