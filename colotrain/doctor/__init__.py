"""What could keep a run from starting, from going fast or from being kept: found beforehand."""
