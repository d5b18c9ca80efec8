"""Last import of the fork server, imported nowhere else.

It exempts all imported objects from garbage collection, here and in the workers: collecting would
write to memory pages that all workers share, and so copy them.
"""

import gc

from colotrain.launch.server.compiler import postpone_compiler

postpone_compiler()
gc.freeze()
gc.enable()
