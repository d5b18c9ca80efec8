"""torch's compiler is imported when something is compiled, and not before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
kept = torch._dynamo.allow_in_graph(lambda x: x)
constant = torch._dynamo.assume_constant_result(lambda: 1)
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
whole = torch._dynamo
print(whole._trace_wrapped_higher_order_op.TransformGetItemToIndex is TransformGetItemToIndex,
      whole.trace_rules.is_callable_allowed(kept), constant._dynamo_marked_constant)
"""


def test_optimizers_and_meta_tensors_do_not_load_the_compiler_and_compiling_does() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stderr == ""
    first, second, third, fourth = done.stdout.splitlines()
    assert first == "False"
    assert second == "True ['eager', 'eager'] True"
    assert third == "True True"
    assert fourth == "True True True"


FAMILIES = """
import sys
import torch
from colotrain.launch.server.compiler import Postponed, postpone_compiler

postpone_compiler()
from transformers import AutoConfig, AutoModelForCausalLM
for kind in ("llama", "gpt2", "qwen2"):
    config = AutoConfig.for_model(kind, vocab_size=16, hidden_size=8, intermediate_size=8,
                                  num_hidden_layers=1, num_attention_heads=2, n_head=2,
                                  num_key_value_heads=2)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    model = AutoModelForCausalLM.from_config(config)
    model(input_ids=tokens, labels=tokens).loss.backward()
print(isinstance(sys.modules["torch._dynamo"], Postponed))
"""


def test_models_of_transformers_train_without_the_compiler() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", FAMILIES], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


FOLDERS = """
import os, sys
import torch
from colotrain.launch.server.compiler import postpone_compiler

postpone_compiler()
print(os.listdir("."))
torch.compile(torch.sin, backend="eager")(torch.ones(3))
from torch._inductor.codecache import _HEADER_DIR, cache_dir
print(cache_dir())
print(_HEADER_DIR)
"""


@pytest.mark.parametrize("chosen", ["", "mine"])
def test_compiled_code_is_in_a_folder_of_the_users_alone(tmp_path: Path, chosen: str) -> None:
    variables = {"COLOTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    if chosen:
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / chosen)
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, "-c", FOLDERS]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True
    )
    assert done.stderr == ""
    before, folder, headers = done.stdout.splitlines()
    assert before == "[]"  # nothing is made where nothing is compiled
    expected = tmp_path / chosen if chosen else tmp_path / "cache" / "compiled"
    assert Path(folder) == expected
    assert Path(headers).is_relative_to(expected)
    if not chosen:
        assert expected.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache").exists() == (not chosen)
