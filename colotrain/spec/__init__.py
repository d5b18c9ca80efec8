"""What things are, as tables and frozen data; standard library only."""
