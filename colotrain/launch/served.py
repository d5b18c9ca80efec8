"""What the server that workers are forked from imports last, and nobody else.

What was imported is never looked at for garbage again, here or in workers: that would also make
copies of the pages that they share.
"""

import gc

from colotrain.launch.compiler import postpone_compiler

postpone_compiler()
gc.freeze()
gc.enable()
