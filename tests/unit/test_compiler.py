"""torch's compiler is imported when something is compiled, and not before."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib.util
import inspect
import sys
import torch
from colotrain.launch.server.compiler import postpone_compiler

postpone_compiler()
here = lambda: "torch._dynamo.eval_frame" in sys.modules

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
weight.grad = torch.ones(2)
optimizer.step()
optimizer.zero_grad()
torch.nn.functional.embedding(torch.empty(3, dtype=torch.int64, device="meta"),
                              torch.empty(4, 2, device="meta"))
assert importlib.util.find_spec("torch._dynamo").name == "torch._dynamo"
inspect.getmodule(here)  # which looks at every module's file
print(here())

@torch._disable_dynamo
def hidden(x):
    return "compiled" if torch.compiler.is_compiling() else "eager"

seen = [hidden(weight)]

def function(x):
    seen.append(hidden(x))
    return torch.sin(x) + 1

x = torch.ones(3)
torch.compile(function, backend="eager")(x)
import torch._dynamo, torch._dynamo.config
print(here(), seen, torch._dynamo.config is sys.modules["torch._dynamo.config"])
print(torch._dynamo.__file__ is not None, hasattr(torch._dynamo, "explain"))
"""


def test_optimizers_and_meta_tensors_do_not_load_the_compiler_and_compiling_does() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stderr == ""
    first, second, third = done.stdout.splitlines()
    assert first == "False"
    assert second == "True ['eager', 'eager'] True"
    assert third == "True True"
