"""Hugging Face model directories: config.json and safetensors, through transformers.

The architecture is always transformers' own: code in the directory is never run, and pickles are
never read. Parameters keep transformers' names.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.models.context_parallel import ATTRIBUTE
from colotrain.models.huggingface_attention import allow_division_, check_calls, divided, num_calls
from colotrain.models.llm import positions_within
from colotrain.models.stored import StoredTensors, weight_files
from colotrain.spec.plan import ModelPlan
from colotrain.torch_internals import hooks_after_gradient_of, hooks_of

IGNORE_INDEX = -100
DTYPES = ("float32", "bfloat16", "float16", "float64")
OWN_ARGS = ("dtype",)
_NAMES = "_colotrain_stored_names"
"""Attribute of a model with a dictionary: parameter → its name in the files."""
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each tensor, for a fingerprint


def build(plan: ModelPlan) -> nn.Module:
    """The model of `plan.hf` with parameters on the meta device, and real buffers.

    Its forward takes batches in colotrain's convention (labels already shifted) and returns the
    summed loss and the number of targets. Raises `ConfigError` for anything wrong in the directory.
    """
    folder = Path(str(plan.hf))
    args = dict(plan.args)
    dtype = _dtype(args.pop("dtype", "float32"))
    config = _config(folder, args)
    model = _construct(_architecture(folder, config), config, dtype)
    files = _open(folder)
    model.__dict__[_NAMES] = _match(model, files, folder)
    if _is_causal(config, type(model)):
        allow_division_(model, config)
        loss = isolating_loss if _sees_documents(model) else shifted_loss
        model.forward = functools.partial(loss, model.forward)
    return model


def shifted_loss(forward: Callable[..., Any], /, *inputs: Any, **batch: Any) -> Any:
    """(summed loss, number of targets) of a causal language model, for labels shifted already.

    Without labels it returns the output of `forward`.
    """
    model = _model_of(forward)
    batch, before = divided(model, batch), num_calls(model)
    labels = batch.pop("labels", None)
    tensors = [value for value in (*inputs, *batch.values()) if isinstance(value, Tensor)]
    with _without_packed_sequence_search() if any(t.is_meta for t in tensors) else nullcontext():
        output = forward(*inputs, use_cache=False, **batch)
    check_calls(model, before)
    if labels is None:
        return output
    loss = F.cross_entropy(
        output.logits.float().flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return loss, (labels != IGNORE_INDEX).sum()


@contextmanager
def _without_packed_sequence_search() -> Iterator[None]:
    """Skip transformers' search for packed sequences, which needs values, on the meta device."""
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    found = getattr(masks, name, None)
    if masks is None or found is None:
        yield
        return
    setattr(masks, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masks, name, found)


def isolating_loss(
    forward: Callable[..., Any],
    /,
    *inputs: Any,
    document_ids: Tensor | None = None,
    **batch: Any,
) -> Any:
    """`shifted_loss` of a model that sees a document's beginning where positions restart at 0."""
    if document_ids is not None:
        batch["position_ids"] = positions_within(document_ids)
        if getattr(_model_of(forward), ATTRIBUTE, None) is not None:
            batch["document_ids"] = document_ids
    return shifted_loss(forward, *inputs, **batch)


def _model_of(forward: Any) -> nn.Module:
    model: nn.Module = forward.__self__
    return model


def _sees_documents(model: nn.Module) -> bool:
    """Whether the architecture uses `create_causal_mask`, whose masks separate documents."""
    return hasattr(sys.modules[type(model).__module__], "create_causal_mask")


def fill_(
    model: nn.Module,
    plan: ModelPlan,
    *,
    rows: Callable[[Tensor], tuple[int, int] | None],
    release: Callable[[Tensor], None] = lambda tensor: None,
) -> None:
    """Read this rank's rows of every parameter and persistent buffer from the directory.

    `rows(parameter)` is the first row and the number of rows this rank holds; None is all.
    `release(tensor)` is called when a tensor is not needed for the moment.
    """
    stored = StoredTensors(weight_files(Path(str(plan.hf))))
    known = stored_names(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in known:
                read_rows_(tensor, stored, known[name], rows(tensor))
                release(tensor)


def stored_names(model: nn.Module) -> dict[str, str]:
    """Parameter or persistent buffer of a model that `build` made → its name in the files."""
    names: dict[str, str] = model.__dict__[_NAMES]
    return names


def read_rows_(
    tensor: Tensor, stored: StoredTensors, name: str, part: tuple[int, int] | None
) -> None:
    """Fill `tensor` (a DTensor's local part) with `part` of the stored tensor `name`."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.numel():
        local.copy_(stored.rows(name, *(part or ())))


@functools.cache
def fingerprint(folder: Path) -> str:
    """Hash of a model directory: its config.json and samples of every tensor's bytes.

    Computed once per process, so that it is of the files with which a run started.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(min(size, 1 << 28))
            digest.update(header)
            for entry in json.loads(header).values():
                if "data_offsets" in entry:
                    for start, length in _samples(*entry["data_offsets"]):
                        file.seek(8 + size + start)
                        digest.update(file.read(length))
    return digest.hexdigest()


def _samples(begin: int, end: int) -> list[tuple[int, int]]:
    """(first byte, number of bytes) of pieces spread evenly over a tensor, its end included."""
    step = max((end - begin - SAMPLE_BYTES) / (SAMPLES - 1), 0.0)
    starts = sorted({begin + int(n * step) for n in range(SAMPLES)})
    return [(start, min(SAMPLE_BYTES, end - start)) for start in starts]


def _config(folder: Path, args: dict[str, Any]) -> Any:
    """The directory's configuration, changed by `model.args`."""
    transformers = _transformers()
    if not (folder / "config.json").is_file():
        fix = "give a directory that save_pretrained made"
        raise _wrong(folder, "a model directory with a config.json", fix)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the library raises about a file of the user's
        if '"auto_map"' in (folder / "config.json").read_text("utf-8", "replace"):
            raise _remote_code(folder) from error
        raise _wrong(folder, f"a config.json that transformers reads ({error})") from error
    if getattr(config, "quantization_config", None) is not None:
        fix = "give the directory of the model before it was quantized"
        raise _wrong(folder, "weights that are not quantized", fix)
    for key, value in args.items():
        if not hasattr(config, key):
            known = ", ".join([*OWN_ARGS, *sorted(config.to_dict())])
            problem = Problem(
                key=f"model.args.{key}",
                value=value,
                expected="a setting of this model",
                fix=f"known: {known}",
            )
            raise ConfigError([problem])
        setattr(config, key, value)
    return config


def _architecture(folder: Path, config: Any) -> type[nn.Module]:
    """The class that config.json names, or the causal language model's where it names none."""
    transformers = _transformers()
    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if getattr(config, "auto_map", None):
        raise _remote_code(folder)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping and not config.architectures:
        return mapping[type(config)]
    expected = f"an architecture of transformers {transformers.__version__}"
    raise _wrong(folder, f"{expected} (config.json names {config.architectures})")


def _is_causal(config: Any, architecture: type) -> bool:
    """Whether `architecture` predicts next tokens, so that colotrain computes its loss."""
    mapping = _transformers().MODEL_FOR_CAUSAL_LM_MAPPING
    return type(config) in mapping and issubclass(architecture, mapping[type(config)])


def _construct(architecture: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    try:
        with parameters_on_meta():
            model: nn.Module = architecture._from_config(config, dtype=dtype)
    except (ValueError, TypeError, ImportError, KeyError) as error:
        expected = f"settings that {architecture.__name__} accepts ({error})"
        raise ConfigError([Problem(key="model.args", expected=expected)]) from error
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context in which new modules get parameters without storage, and real buffers.

    Rotary frequencies and the like are in no file: only the constructor computes them.
    """
    register = nn.Module.register_parameter
    known = WeakIdKeyDictionary()  # a parameter may have several names

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in known:
                known[parameter] = _to_meta(parameter)
            parameter = known[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _to_meta(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of `parameter` without storage, with its attributes and hooks."""
    found = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    found.__dict__.update(vars(parameter))
    for hook in hooks_of(parameter).values():
        found.register_hook(hook)
    for hook in hooks_after_gradient_of(parameter).values():
        found.register_post_accumulate_grad_hook(hook)
    return found


def _open(folder: Path) -> StoredTensors:
    try:
        return StoredTensors(weight_files(folder))
    except ColotrainError as error:
        problem = Problem(
            key="model.hf", value=folder, expected=f"weights ({error.problem})", fix=error.fix
        )
        raise ConfigError([problem]) from error


def _match(model: nn.Module, files: StoredTensors, folder: Path) -> dict[str, str]:
    """Parameter or persistent buffer → its name in the files; raises `ConfigError` on a mismatch.

    A tied parameter is found under any of its names. Directories of a base model (as GPT-2's) lack
    the prefix that names have in the model with a head.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    base = f"{getattr(model, 'base_model_prefix', '')}."
    wanted: dict[str, tuple[Tensor, list[str]]] = {
        name: (p, aliases[id(p)]) for name, p in model.named_parameters()
    }
    persistent = model.state_dict().keys()
    wanted |= {n: (b, [n]) for n, b in model.named_buffers() if n in persistent}
    found, problems = {}, []
    for name, (tensor, names) in wanted.items():
        candidates = [*names, *(n.removeprefix(base) for n in names), *(base + n for n in names)]
        stored = next((c for c in candidates if c in files), None)
        if stored is None:
            if isinstance(tensor, nn.Parameter):  # a buffer keeps what the constructor gave it
                problems.append(f"{name} is missing")
        elif files.shape(stored) != tuple(tensor.shape):
            problems.append(f"{name} is {files.shape(stored)}, not {tuple(tensor.shape)}")
        else:
            found[name] = stored
    _refuse_more_layers(model, set(files) - set(found.values()), folder)
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        fix = "its names or shapes are not those of this version of transformers: load it with "
        fix += "transformers and save it again; architectures that it converts are not supported"
        raise _wrong(folder, f"weights of its config.json ({problems[0]}{more})", fix)
    return found


def _refuse_more_layers(model: nn.Module, unused: set[str], folder: Path) -> None:
    """Raise `ConfigError` where the files hold more layers of a list than config.json says."""
    ignored: Any = model._keys_to_ignore_on_load_unexpected or ()
    lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    base = f"{getattr(model, 'base_model_prefix', '')}."
    lists |= {n.removeprefix(base): count for n, count in lists.items()}
    for name in sorted(unused):
        parts = name.split(".")
        for at, part in enumerate(parts):
            count = lists.get(".".join(parts[:at])) if part.isdecimal() else None
            if count is None or int(part) < count or any(re.search(g, name) for g in ignored):
                continue
            known = f"{count} layers of {'.'.join(parts[:at])}, as its config.json says"
            fix = "correct config.json, or model.args; what is left out would be lost"
            raise _wrong(folder, f"{known} (its weights have {name})", fix)


def _dtype(name: Any) -> torch.dtype:
    if str(name) not in DTYPES:
        problem = Problem(
            key="model.args.dtype", value=name, expected=f"one of {', '.join(DTYPES)}"
        )
        raise ConfigError([problem])
    return getattr(torch, str(name))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        expected = f"transformers, which cannot be imported ({error})"
        fix = "install it: pip install 'colotrain[hf]'"
        raise ConfigError([Problem(key="model.hf", expected=expected, fix=fix)]) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice is for its own trainer
    return transformers


def _remote_code(folder: Path) -> ConfigError:
    expected = "an architecture of transformers itself (this directory brings code of its own)"
    fix = "code in a model directory is never run: write a function that loads it and name that "
    return _wrong(folder, expected, fix + "in model.target")


def _wrong(folder: Path, expected: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(key="model.hf", value=folder, expected=expected, fix=fix)])
