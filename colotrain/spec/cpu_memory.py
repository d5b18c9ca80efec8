"""Sizes of the memory in which ranks on CPU train: the engine allocates by them, the planner counts
by them."""

LARGEST_BUFFER_BYTES = 64 << 20
"""Bytes of the largest shared buffer. Larger groups use windows, which take less memory."""
WINDOW_BYTES = 4 << 20
"""Bytes of each rank's window. It has two halves: one is filled while the other is read."""
NUM_SLOTS = 2
"""Slots per pair of ranks in reductions: one is written while the other is read."""
MOST_WRITTEN_BYTES = 32 << 20
"""Upper bound of the bytes that a rank writes for all others; larger groups go in pieces."""
OWN_PAGES_BYTES = 32 << 20
"""Size from which on an allocation while training has its own pages, which are returned to the
system when it is freed; malloc accepts no larger value. Smaller ones are in malloc's heap, which
stays resident."""
