"""What the server that workers are forked from imports first, and nobody else.

Signals to the whole process group (a closing terminal, `timeout`, a batch system) are the
launcher's to handle: a server that died of one would take the workers with it.

Imports only make objects that stay: looking for garbage among them took a sixth of their time.
`colotrain.launch.served`, the last import, begins to look again.
"""

import gc
import signal

for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)
gc.disable()
