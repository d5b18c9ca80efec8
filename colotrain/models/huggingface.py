"""Hugging Face model directories: config.json and safetensors, through transformers.

The architecture is always transformers' own: code in the directory is never run, and pickles are
never read. Parameters keep transformers' names.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from colotrain import module_tree
from colotrain.errors import ColotrainError, ConfigError, Problem, message_of
from colotrain.models.facts import facts_of
from colotrain.models.filling import Shards
from colotrain.models.huggingface_attention import allow_division_, allow_division_inside_
from colotrain.models.huggingface_documents import can_keep_documents_apart
from colotrain.models.huggingface_files import Extended, Source, load
from colotrain.models.huggingface_heads import change_head_, is_encoder, padded
from colotrain.models.huggingface_internals import draw_, let_experts_compute_anywhere_
from colotrain.models.huggingface_loss import (
    balances_experts,
    chunk_loss_,
    find_balancing_loss_,
    isolating_loss,
    own_loss,
    shifted_loss,
)
from colotrain.models.huggingface_match import (
    ParameterCounter,
    check_layers,
    keep_in_float32_,
    match_,
    sources_of,
    wrong,
)
from colotrain.models.huggingface_task import (
    CAUSAL,
    MASKED,
    WITHOUT_LOSS,
    Task,
    check_predicts_next_token,
    is_in,
    task_of,
)
from colotrain.models.huggingface_tensors import allow_parts_, has_plan
from colotrain.models.quantized.stored import FORMATS, method_of, open_weights
from colotrain.models.stored import StoredTensors, weight_files
from colotrain.offline import offline
from colotrain.spec.objectives import EmbedPlan
from colotrain.spec.plan import ModelPlan
from colotrain.torch_internals import hooks_after_gradient_of, hooks_of

DTYPES = ("float32", "bfloat16", "float16", "float64")
OWN_ARGS = ("dtype",)
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each tensor, for a fingerprint


@offline()
def build(
    plan: ModelPlan, *, loads: bool = False, values: dict[str, Tensor] | None = None
) -> nn.Module:
    """The model of `plan.hf` with parameters on the meta device, and real buffers.

    With `loads` transformers itself reads its weights, or takes `values` for the tensors of the
    files, and everything is real.

    A causal language model takes batches in colotrain's convention (labels already shifted) and
    returns the summed loss and the number of targets; any other has transformers' own loss. Raises
    `ConfigError` for anything wrong in the directory.
    """
    folder = Path(str(plan.hf))
    args = dict(plan.args)
    dtype = _dtype(args.pop("dtype", "float32"))
    config = _config(folder, args)
    if (head := plan.head) is not None:
        architecture = change_head_(_transformers(), config, head, folder)
    else:
        architecture = _architecture_of(plan, config)
    task = task_of(_transformers(), config, architecture)
    if task is None and not _gives_vectors(plan):
        _check_has_loss(folder, config, architecture)
    model = _construct(architecture, config, dtype, folder if loads else None, values)
    match_(model, _open(folder), folder)
    keep_in_float32_(model, dtype)
    let_experts_compute_anywhere_()
    facts_of(model).task = task
    if predicts_next(model):
        check_predicts_next_token(_transformers(), folder, model)
        _check_balance(model)
        let_predict_next_(model)
    else:
        let_divide_matrices_(model)
        _keep_no_keys(model)
        if task is not None:
            model.forward = functools.partial(own_loss, model.forward, task)
    if head is not None or _gives_vectors(plan) or task is MASKED:
        let_divide_samples_(model)
    if head is not None:
        masks = is_encoder(_transformers(), config)
        model.forward = functools.partial(padded, model.forward, head.pad_id, masks)
    return model


def let_predict_next_(model: Any) -> None:
    """Give a causal model of transformers colotrain's loss, and let ranks divide it if they can."""
    allow_parts_(model)
    allow_division_(model, model.config)
    chunk_loss_(model)
    loss = isolating_loss if can_keep_documents_apart(model) else shifted_loss
    model.forward = functools.partial(loss, model.forward)


def let_divide_matrices_(model: Any) -> None:
    """Let ranks divide the matrices of a model that is no causal one, if transformers says how."""
    if has_plan(model):
        allow_parts_(model)


def let_divide_samples_(model: Any) -> None:
    """Let ranks divide the samples of such a model, if they can: an encoder, or one with a head."""
    sees_all = is_encoder(_transformers(), model.config)
    allow_division_inside_(model, model.config, sees_all=sees_all)


def _keep_no_keys(model: nn.Module) -> None:
    """Let forward keep no keys of attention: recomputation would find them in its own forward."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.forward = functools.partial(model.forward, use_cache=False)


def task_in(model: nn.Module) -> Task | None:
    """The task of a model that `build` made; None for any other, and for one without a known."""
    return facts_of(model).task


def predicts_next(model: nn.Module) -> bool:
    """Whether `build` made a model that predicts next tokens, whose loss is colotrain's."""
    task = task_in(model)
    return task is not None and task.predicts_next


def fill_(
    model: nn.Module,
    plan: ModelPlan,
    *,
    seed: int,
    shards: Shards,
    given: Set[str] = frozenset(),
) -> None:
    """Read this rank's part of every parameter and persistent buffer from the directory.

    What the files lack gets transformers' initial values under `seed`, of which `shards` stores
    this rank's part. Tensors whose names are in `given` are not read.
    """
    stored = open_weights(Path(str(plan.hf)))
    found = sources_of(model).found
    tensors = {
        **dict(module_tree.named_parameters(model)),
        **dict(module_tree.named_buffers(model)),
    }
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in found and name not in given:
                _read_part_(tensor, stored, found[name], shards.slices(tensor))
                if isinstance(tensor, nn.Parameter):  # buffers stay where they are
                    shards.release(tensor)
        for name, whole in missing_values(model, plan, seed).items():
            if name not in given:
                shards.write(tensors[name], whole)
                shards.release(tensors[name])


def _read_part_(
    tensor: Tensor, stored: StoredTensors, source: Source, part: tuple[slice, ...]
) -> None:
    """Fill `tensor` (a DTensor's local part) with `part` of its source."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.numel() or local.is_meta:  # on the meta device: another pipeline stage's
        return
    rows = (part[0].start, part[0].stop - part[0].start) if part else ()
    local.copy_(source.rows(stored, *rows)[(slice(None), *part[1:]) if part else ...])


def missing_values(model: Any, plan: ModelPlan, seed: int) -> dict[str, Tensor]:
    """Initial values of parameters that the files lack, the same on all ranks."""
    missing = sources_of(model).missing
    if not missing:
        return {}
    architecture = _architecture_of(plan, model.config)
    dtype = _dtype(plan.args.get("dtype", "float32"))
    values = draw_(_construct(architecture, model.config, dtype), missing, seed=seed)
    return dict(zip(missing, values, strict=True))


def is_from_directory(model: nn.Module) -> bool:
    """Whether `build` made the model; otherwise a function of the user's did."""
    return facts_of(model).sources is not None


def names_with_new_rows(model: nn.Module) -> Iterator[str]:
    """Names of parameters with more rows than the model's directory has."""
    found = sources_of(model).found.items()
    return (name for name, source in found if isinstance(source, Extended))


def is_plain(model: nn.Module) -> bool:
    """Whether the model is of a class of transformers itself, so that transformers loads it."""
    return type(model).__module__.startswith("transformers.") and hasattr(model, "config")


def has_other_files(model: nn.Module) -> bool:
    """Whether the model's files have other names or parts of tensors than the model."""
    if is_from_directory(model):
        return bool(sources_of(model).transforms)
    known = module_tree.named_parameters(model)
    like = {name: torch.empty_like(tensor, device="meta") for name, tensor in known}
    return as_stored(model, like).keys() != like.keys()


def as_stored(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model under the names, and in the parts, that they have in its files."""
    from transformers.core_model_loading import revert_weight_conversion

    made: Any = model
    if is_from_directory(model):
        made._weight_conversions = sources_of(model).transforms
    found: dict[str, Tensor] = revert_weight_conversion(made, tensors)
    return found


def peft_task(model: nn.Module) -> str | None:
    """PEFT's name of the model's task; a model of another kind is taken for a causal one."""
    task: Task | None = CAUSAL
    made: Any = model
    if is_plain(model) and is_in(_transformers(), WITHOUT_LOSS, made.config, type(model)):
        return "FEATURE_EXTRACTION"
    if is_from_directory(model):
        task = task_in(model)
    elif is_plain(model):
        task = task_of(_transformers(), model.config, type(model))
    return task.peft if task is not None else None


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
        raise wrong(folder, "a model directory with a config.json", fix)
    check_layers(folder, args)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the library raises about a file of the user's
        if '"auto_map"' in (folder / "config.json").read_text("utf-8", "replace"):
            raise _remote_code(folder) from error
        raise wrong(folder, f"a config.json that transformers reads ({error})") from error
    _take_quantization_(config, folder)
    _change_(config, args, "model.args")
    return config


def _take_quantization_(config: Any, folder: Path) -> None:
    """Remove from a configuration how the files are quantized, which `open_weights` knows.

    Raises `ConfigError` for quantized weights that it does not read.
    """
    method = method_of(folder)
    if method in FORMATS:
        del config.quantization_config
    if any(getattr(part, "quantization_config", None) for part in _parts(config)):
        expected = f"weights that are not quantized, or by {' or '.join(FORMATS)}"
        fix = "give the directory from before that; model.quantize packs its weights as it is read"
        raise wrong(folder, f"{expected} (config.json names {method})", fix)


def _parts(config: Any) -> Iterator[Any]:
    """A configuration, and all that it holds."""
    yield config
    for held in vars(config).values():
        if hasattr(held, "model_type"):
            yield from _parts(held)


def _change_(config: Any, args: dict[str, Any], where: str) -> None:
    """Change settings of a configuration, and of those that it holds."""
    for key, value in args.items():
        holder = config if hasattr(config, key) else config.get_text_config()
        if not hasattr(holder, key) or key in ("dtype", "torch_dtype"):  # of the parts: one of all
            known = ", ".join([*OWN_ARGS, *sorted(config.to_dict())])
            key, expected = f"{where}.{key}", "a setting of this model"
            wrong_key = Problem(key=key, value=value, expected=expected, fix=f"known: {known}")
            raise ConfigError([wrong_key])
        if isinstance(value, dict) and hasattr(getattr(holder, key), "to_dict"):
            _change_(getattr(holder, key), value, f"{where}.{key}")
        else:
            setattr(holder, key, value)


def _gives_vectors(plan: ModelPlan) -> bool:
    """Whether the objective takes hidden states, not what a head makes of them."""
    return isinstance(plan.objective, EmbedPlan)


def _architecture_of(plan: ModelPlan, config: Any) -> type[nn.Module]:
    """The class that config.json names, or that class without its head, as AutoModel has it."""
    folder = Path(str(plan.hf))
    if not _gives_vectors(plan):
        return _architecture(folder, config)
    found = _transformers().MODEL_MAPPING.get(type(config), None)
    found = found[0] if isinstance(found, list | tuple) else found
    if found is None or getattr(config, "is_encoder_decoder", False):
        expected = f"an encoder or a decoder of transformers (it is a {config.model_type})"
        raise wrong(folder, expected, "name another directory, or set train.objective=null")
    return found


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
    raise wrong(folder, f"{expected} (config.json names {config.architectures})")


def _check_has_loss(folder: Path, config: Any, architecture: type) -> None:
    if is_in(_transformers(), WITHOUT_LOSS, config, architecture):
        expected = f"an architecture with a loss ({architecture.__name__} has no head)"
        fix = "load it into one with a head, such as AutoModelForCausalLM, and save that"
        raise wrong(folder, expected, fix)


def _check_balance(model: nn.Module) -> None:
    if balances_experts(model) and not find_balancing_loss_(model):
        key, name = "model.args.output_router_logits", type(model).__name__
        expected = f"false: the auxiliary loss of {name} is not known to colotrain"
        raise ConfigError([Problem(key=key, value=True, expected=expected, fix=f"set {key}=false")])


def _construct(
    architecture: Any,
    config: Any,
    dtype: torch.dtype,
    folder: Path | None = None,
    values: dict[str, Tensor] | None = None,
) -> nn.Module:
    """The model on the meta device, or with its weights in `folder`, or with `values`."""
    try:
        if folder is not None:
            return load(architecture, config, dtype, folder, values)
        with parameters_on_meta(ParameterCounter(architecture).add):
            model: nn.Module = architecture._from_config(config, dtype=dtype)
    except Exception as error:  # whatever the library raises about sizes
        of_weights = folder is not None and isinstance(error, RuntimeError | MemoryError | OSError)
        if of_weights or isinstance(error, ColotrainError):
            raise
        expected = f"settings that {architecture.__name__} accepts ({message_of(error)})"
        raise ConfigError([Problem(key="model.args", expected=expected)]) from error
    return model


@contextmanager
def parameters_on_meta(
    registered: Callable[[nn.Parameter], None] = lambda parameter: None,
) -> Iterator[None]:
    """Context in which new modules get parameters without storage, and real buffers.

    Rotary frequencies and the like are in no file: only the constructor computes them. `registered`
    is called with each parameter that a module gets.
    """
    register = nn.Module.register_parameter
    known = WeakIdKeyDictionary()  # a parameter may have several names

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in known:
                known[parameter] = _to_meta(parameter)
            parameter = known[parameter]
        register(module, name, parameter)
        if parameter is not None:
            registered(parameter)

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
        return open_weights(folder)
    except ColotrainError as error:
        problem = Problem(
            key="model.hf", value=folder, expected=f"weights ({error.problem})", fix=error.fix
        )
        raise ConfigError([problem]) from error


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
    return wrong(folder, expected, fix + "in model.target")
