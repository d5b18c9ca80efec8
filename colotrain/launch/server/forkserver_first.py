"""First import of the fork server, imported nowhere else.

The launcher handles signals to the whole process group (from a closing terminal, `timeout`, a batch
system): a server that died of one would end the workers too.

Garbage collection is off during the imports, which only create objects that stay: it took a sixth
of their time. `colotrain.launch.server.forkserver_last`, the last import, turns it on again.
"""

import gc
import signal

for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)
gc.disable()
