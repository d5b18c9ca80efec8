"""Reads an exported directory as its users do, in a process that has none of colotrain's code.

Run as `python -P reader.py FOLDER`. `request.json` and `samples.safetensors` in FOLDER say what to
compute, `answer.json` and `outputs.safetensors` are the results. Losses are written out here, from
logits, so that nothing is shared with training but the numbers in the files.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import operator
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

IGNORE_INDEX = -100
Batch = dict[str, Tensor]


def main(work: Path) -> None:
    request = json.loads((work / "request.json").read_text("utf-8"))
    OWN_FOLDERS.extend(request["import_from"])
    folder, problems = Path(request["folder"]), list[str]()
    load = {"hf": load_model, "peft": load_adapter, "own": load_own}[request["kind"]]
    tensors = load_file(work / "samples.safetensors") if request["has_samples"] else {}
    batches, samples = grouped(tensors, "batch"), grouped(tensors, "sample")
    answer: dict[str, Any] = {"tokenizer": read_tokenizer(folder, request, problems)}
    model = load(folder, request, problems)
    if model is not None:
        with torch.no_grad():
            outputs = {f"{n}": output_of(model, s, request) for n, s in enumerate(samples)}
            answer["probe"] = [probe(model, ids) for ids in request["probe"]]
            sums = list(loss_sums(model, batches, request))
        save_file({n: t.contiguous() for n, t in outputs.items()}, work / "outputs.safetensors")
        answer["losses"] = [[sum(column) for column in zip(*pair, strict=True)] for pair in sums]
    answer["problems"] = problems
    answer["versions"] = {n: sys.modules[n].__version__ for n in LIBRARIES if n in sys.modules}
    answer["foreign"] = sorted(n for n in sys.modules if n.partition(".")[0] == "colotrain")
    (work / "answer.json").write_text(json.dumps(answer), "utf-8")


LIBRARIES = ("torch", "transformers", "peft")


def grouped(tensors: Batch, kind: str) -> list[Batch]:
    """Tensors called `KIND/NUMBER/NAME`, as a list of `{NAME: tensor}`."""
    found: dict[int, Batch] = {}
    for name, tensor in tensors.items():
        of, number, own = name.split("/", 2)
        if of == kind:
            found.setdefault(int(number), {})[own] = tensor
    return [found[number] for number in sorted(found)]


def load_model(
    folder: Path,
    request: dict[str, Any],
    problems: list[str],
    *,
    made: dict[str, Any] | None = None,
    later: Sequence[str] = (),
) -> Any:
    """The model as transformers loads it, of the class that its config.json names.

    `made` is another configuration, `later` the modules that get their weights elsewhere.
    """
    import transformers

    config = made or json.loads((folder / "config.json").read_text("utf-8"))
    architecture: Any = getattr(transformers, (config.get("architectures") or [""])[0], None)
    base = transformers.PreTrainedModel
    is_model = isinstance(architecture, type) and issubclass(architecture, base)
    if not is_model:
        problems.append(f"config.json names no architecture: {config.get('architectures')}")
        return None
    own = {} if made is None else {"config": architecture.config_class.from_dict(made)}
    place: Path | None = folder
    quantized = json.loads((folder / "config.json").read_text("utf-8")).get("quantization_config")
    if quantized:
        settings = {n: v for n, v in config.items() if n != "quantization_config"}
        if quantized.get("quant_method") == "bitsandbytes":  # whose library may not be there
            place, own = None, {"state_dict": dequantized(folder)}
        else:
            settings["quantization_config"] = {**quantized, "dequantize": True}
        own["config"] = architecture.config_class.from_dict(settings)
    try:
        model, told = architecture.from_pretrained(
            place,
            **own,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except Exception as error:  # whatever the library raises about files that are wrong
        problems.append(f"transformers does not load it: {type(error).__name__}: {error}")
        return None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = {str(name) for name in told.get(kind) or ()}
        if kind == "unexpected_keys" and made is not None:
            continue  # of a head that this model does not have
        if kind == "missing_keys":
            found = {n for n in found if not any(f".{module}." in f".{n}" for module in later)}
        if found:
            names = ", ".join(sorted(found))
            problems.append(f"{kind.replace('_', ' ')} in the weights: {names[:500]}")
    return model.eval()


def load_adapter(folder: Path, request: dict[str, Any], problems: list[str]) -> Any:
    """The base model with the adapter as PEFT loads it; None where no base is to be loaded."""
    if request["base"] is None:
        return None
    from peft import PeftModel

    settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    base = load_model(
        Path(request["base"]),
        request,
        problems,
        made=request.get("base_config"),
        later=settings.get("modules_to_save") or (),
    )
    if base is None:
        return None
    round_(base, request["quantized"])
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, folder)
    except Exception as error:  # whatever the library raises about files that are wrong
        problems.append(f"PEFT does not load it: {type(error).__name__}: {error}")
        return None
    problems += [text for w in told if "adapter keys" in (text := str(w.message))]
    return model.eval()


NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def rounded_nf4(weight: Tensor) -> Tensor:
    """The weight with the nearest of 16 shares of the largest of each 64 numbers."""
    flat, values = weight.flatten(), torch.tensor(NF4)
    blocks = F.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    shares = (blocks * (1.0 / largest.clamp(min=1e-38))).contiguous()
    above = torch.searchsorted(values, shares).clamp(1, 15)
    low, high = values[above - 1], values[above]
    nearest = torch.where(shares.double() - low <= high.double() - shares, low, high)
    return (nearest * largest).flatten()[: len(flat)].view_as(weight)


def rounded_int8(weight: Tensor) -> Tensor:
    """The weight in 127ths of the largest number of each row."""
    largest = weight.abs().amax(1, keepdim=True)
    return (weight * (127.0 / largest.clamp(min=1e-30))).round() * (largest / 127.0)


def rounded_mxfp4(weight: Tensor) -> Tensor:
    """The weight in 4-bit floats times a power of two for each 32 numbers of a row.

    Floats with one bit of mantissa are halves of powers of two, from 1 on: whole numbers of steps.
    """
    padded = F.pad(weight, (0, -weight.shape[1] % 32))
    blocks = padded.unflatten(1, (-1, 32)).double()
    largest = blocks.abs().amax(2, keepdim=True)
    power = torch.exp2(largest.log2().floor().clamp(-125, 129) - 2)
    shares = blocks / power
    steps = torch.exp2(shares.abs().log2().floor().clamp(0, 2) - 1)
    nearest = ((shares / steps).round() * steps).clamp(-6, 6)
    return (nearest * power).flatten(1)[:, : weight.shape[1]].float().contiguous()


ROUNDED = {"nf4": rounded_nf4, "int8": rounded_int8, "mxfp4": rounded_mxfp4}


def dequantized(folder: Path) -> Batch:
    """The tensors of a directory with 4-bit codes or int8 of bitsandbytes, as float32."""
    found: Batch = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    for name in [name for name in found if ".quant_state.bitsandbytes__" in name]:
        settings = json.loads(bytes(found.pop(name).tolist()))
        name = name.partition(".quant_state.")[0]
        scales = found.pop(f"{name}.absmax")
        if "nested_blocksize" in settings:
            inner = found.pop(f"{name}.nested_absmax")
            inner = inner.repeat_interleave(settings["nested_blocksize"])[: len(scales)]
            scales = found.pop(f"{name}.nested_quant_map")[scales.int()] * inner
            scales = scales + settings["nested_offset"]
        codes = found[name].flatten().int()
        numbers = found.pop(f"{name}.quant_map")[torch.stack((codes >> 4, codes & 15), 1)].flatten()
        numbers = numbers * scales.repeat_interleave(settings["blocksize"])[: len(numbers)]
        found[name] = numbers[: torch.Size(settings["shape"]).numel()].view(settings["shape"])
    for name in [name for name in found if name.endswith(".SCB")]:
        weight = f"{name.removesuffix('SCB')}weight"
        found.pop(f"{weight}_format", None)
        found[weight] = found[weight].float() * (found.pop(name).float()[:, None] / 127.0)
    return found


DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}


def round_(base: Any, quantized: dict[str, str] | None) -> None:
    """Give the weights that the run held as packed blocks what these stand for.

    `quantized` names the scheme and the dtype of each layer, or parameter with experts:
    `nf4 of bfloat16`. Experts are packed as the layers that they are, one after another.
    """
    for name, how in (quantized or {}).items():
        scheme, _, dtype = how.partition(" of ")
        owner, _, key = name.rpartition(".")
        module, held = base.get_submodule(owner), DTYPES[dtype]
        is_stack = key in dict(module.named_parameters(recurse=False))
        weight = getattr(module, key) if is_stack else getattr(module, key).weight
        turned = is_stack and getattr(module, "is_transposed", False)
        rows = (weight.data.mT if turned else weight.data).to(held).float()
        found = ROUNDED[scheme](rows.reshape(-1, rows.shape[-1])).view(rows.shape).to(held)
        weight.data = (found.mT if turned else found).contiguous().to(weight.dtype)


def load_own(folder: Path, request: dict[str, Any], problems: list[str]) -> Any:
    """A model of the user's own class, with the tensors loaded by name."""
    model = uncompiled(imported(request["target"])(**request["args"])).eval()
    tensors: Batch = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names: dict[int, set[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        names.setdefault(id(tensor), set()).add(name)
    absent = [n for n in known if n in model.state_dict() and not names[id(known[n])] & {*tensors}]
    unknown = set(tensors) - set(model.state_dict())
    if absent or unknown:
        problems.append(f"missing: {', '.join(absent)}; unknown: {', '.join(sorted(unknown))}")
    dtypes = {n: t.dtype for n, t in model.state_dict().items()}
    fitting = {n: t.to(dtypes[n]) for n, t in tensors.items() if n in dtypes}
    try:
        model.load_state_dict(fitting, strict=False)
    except RuntimeError as error:
        problems.append(f"the tensors do not fit: {error}")
        return None
    return model


def uncompiled(model: Any) -> Any:
    """The model without what torch.compile puts around modules, which changes names."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            setattr(module, name, within(child))
    return within(model)


def within(module: Any) -> Any:
    is_around = type(module).__name__ == "OptimizedModule"
    return next(iter(module.children())) if is_around else module


OWN_FOLDERS: list[str] = []
"""Folders of the user's modules."""


def imported(dotted: str) -> Any:
    """What a setting names, first looked up in the user's folders; what it imports, there last."""
    sys.path += [folder for folder in OWN_FOLDERS if folder not in sys.path]
    module, _, names = dotted.partition(":")
    package = module.partition(".")[0]
    if package not in {*sys.modules, *sys.stdlib_module_names}:
        spec = PathFinder.find_spec(package, OWN_FOLDERS)
        if spec is not None and spec.loader is not None:
            sys.modules[package] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[package])
    return operator.attrgetter(names)(importlib.import_module(module))


def read_tokenizer(folder: Path, request: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """What transformers makes of the tokenizer: ids of the texts, and the chat template."""
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return {}
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        ids = [tokenizer(text)["input_ids"] for text in request["texts"]]
    except Exception as error:  # whatever the library raises about files that are wrong
        problems.append(f"transformers does not load the tokenizer: {error}")
        return {}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    found = {"ids": ids, "template": template, "template_sha256": None, "sha256": None}
    if template is not None:
        found["template_sha256"] = hashlib.sha256(template.encode()).hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        found["sha256"] = hashlib.sha256(backend.to_str().encode()).hexdigest()
    return found


def causal_logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits [batch, seq, vocab]; each document of `document_ids` is read by itself."""
    inputs = {n: t for n, t in batch.items() if n not in ("labels", "document_ids")}
    documents = batch.get("document_ids")
    if documents is None:
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits.float()
    rows = []
    for row, own in enumerate(documents):
        ends = [*(own[1:] != own[:-1]).nonzero().flatten().add(1).tolist(), len(own)]
        parts = []
        for begin, end in zip([0, *ends], ends, strict=False):
            part = {n: t[row : row + 1, begin:end] for n, t in inputs.items()}
            parts.append(model(**part, use_cache=False).logits.float())
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


def output_of(model: Any, sample: Batch, request: dict[str, Any]) -> Tensor:
    """Logits of a sample, flat; of a model of the user's own, its loss."""
    if request["outputs"] == "causal":
        return causal_logits(model, sample).flatten()
    if request["outputs"] == "loss":
        ways = WAYS[request["loss"]["kind"]](model, sample, request["loss"])
        return ways[0][0].double().reshape(1)
    has_function = request["loss"]["kind"] == "function"
    inputs = taken_from(sample, model, is_hf=request["loss"]["is_hf"]) if has_function else sample
    return flat_logits(model(**inputs))


def flat_logits(output: Any) -> Tensor:
    """Logits in a model's output, flat, or all its tensors of floats where it has no logits."""
    if isinstance(output, Tensor):
        return output.float().flatten()
    named = {n: t for n, t in output.items() if isinstance(t, Tensor) and t.is_floating_point()}
    logits = [tensor for name, tensor in named.items() if name.endswith("logits")]
    return torch.cat([tensor.float().flatten() for tensor in logits or named.values()])


def probe(model: Any, ids: list[int]) -> list[float]:
    """A few numbers of the logits after some tokens."""
    logits = causal_logits(model, {"input_ids": torch.tensor([ids])})[0, -1].double()
    return [logits.logsumexp(0).item(), *logits[:8].tolist()]


def loss_sums(
    model: Any, batches: list[Batch], request: dict[str, Any]
) -> Iterator[list[tuple[float, float]]]:
    """For each way to count targets: summed loss and count of every batch."""
    kind = request["loss"]["kind"]
    if kind == "none" or not batches:
        return
    ways = list(zip(*(WAYS[kind](model, batch, request["loss"]) for batch in batches), strict=True))
    for way in ways:
        yield [(float(total), float(count)) for total, count in way]


Sums = tuple[tuple[Tensor, Tensor], ...]


def causal_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """Cross-entropy of labels that are shifted already, and the routers' loss of each sample."""
    labels = batch["labels"]
    logits = causal_logits(model, batch)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    counts = (labels != IGNORE_INDEX).sum(1)
    if getattr(model.config, "output_router_logits", False):
        for row, count in enumerate(counts):
            if count:
                total = total + count * routers_loss(model, batch, row)
    return ((total, counts.sum()),)


def routers_loss(model: Any, batch: Batch, row: int) -> Tensor:
    """Auxiliary loss of a sample without the padding at its end."""
    last = int((batch["labels"][row] != IGNORE_INDEX).nonzero().max()) + 1
    skipped = ("labels", "document_ids", "attention_mask")
    inputs = {n: t[row : row + 1, :last] for n, t in batch.items() if n not in skipped}
    found: Tensor = model(**inputs, output_router_logits=True, use_cache=False).aux_loss
    return found * float(model.config.router_aux_loss_coef)


def own_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    return weighted(model(**batch), batch, loss["ignored"])


def function_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """The loss of the user's function of a batch and the model's outputs."""
    output = model(**taken_from(batch, model, is_hf=loss["is_hf"]))
    if loss["is_hf"] and "document_ids" in batch:
        output.logits = causal_logits(model, batch)
    return weighted(imported(loss["function"])(batch, output), batch, loss["ignored"])


def taken_from(batch: Batch, model: Any, *, is_hf: bool) -> dict[str, Any]:
    """The entries of a batch that forward takes by name; of `model.hf` without the labels."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    taken = inspect.signature(type(bare).forward if is_hf else bare.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()) and not is_hf
    inputs: dict[str, Any] = {n: t for n, t in batch.items() if n in taken or takes_all}
    if is_hf:
        inputs.pop("labels", None)
    config = getattr(bare, "config", None)
    if getattr(config, "is_encoder_decoder", False) and "labels" not in inputs:
        if "labels" in batch and "decoder_input_ids" not in inputs:
            shifted = bare.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
            inputs["decoder_input_ids"] = shifted
        inputs["use_cache"] = False
    return inputs


def weighted(output: Any, batch: Batch, ignored: int | None) -> Sums:
    """Summed loss and count, for each way to count the targets of a mean.

    `ignored` is the label that is no target; None where all labels count.
    """
    found, own = output, None
    if isinstance(output, Mapping):
        found, own = output.get("loss"), output.get("num_targets")
    elif not isinstance(output, tuple):
        found, own = getattr(output, "loss", output), getattr(output, "num_targets", None)
    if isinstance(found, tuple):
        return ((found[0], torch.as_tensor(found[1])),)
    counts = counts_of(batch, ignored) if own is None else (torch.as_tensor(own),)
    return tuple((found * count if count else found.new_zeros(()), count) for count in counts)


def counts_of(batch: Batch, ignored: int | None) -> tuple[Tensor, ...]:
    """Numbers of targets: of labels, of labels without each row's first, and of samples."""
    labels, rows = batch.get("labels"), torch.tensor(len(next(iter(batch.values()))))
    if labels is None:
        return (rows,)
    is_target = torch.ones_like(labels, dtype=torch.bool)
    if ignored is not None and not labels.is_floating_point():
        is_target = labels.ne(ignored)
    return is_target.sum(), is_target[:, 1:].sum() if labels.ndim > 1 else rows, rows


def preference_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """-log sigmoid of beta times the difference of the rewards, of each pair."""
    reference = reference_of(loss)
    labels = batch["labels"]
    flat = {n: t.flatten(0, 1) for n, t in batch.items()}
    gains = (log_probs(model, flat) - log_probs(reference, flat)).view(labels.shape[:2])
    counted = (labels != IGNORE_INDEX).any(-1).all(-1)
    losses = -F.logsigmoid(float(loss["beta"]) * (gains[:, 0] - gains[:, 1]))
    return ((losses[counted].sum(), counted.sum()),)


def rated_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """KTO's loss of each answer; the batch is a whole global batch, for the KL is its mean."""
    reference, beta = reference_of(loss), float(loss["beta"])
    both = {n: batch[n].flatten(0, 1) for n in ("input_ids", "labels")}
    gains = (log_probs(model, both) - log_probs(reference, both)).view(-1, 2)
    counted = (batch["labels"] != IGNORE_INDEX).any(-1)
    others = gains[:, 1][counted[:, 1]]
    kl = (others.sum() / max(len(others), 1)).clamp(min=0)
    is_good = batch["is_good"].bool()
    of_good = float(loss["desirable_weight"]) * (1 - torch.sigmoid(beta * (gains[:, 0] - kl)))
    of_bad = float(loss["undesirable_weight"]) * (1 - torch.sigmoid(beta * (kl - gains[:, 0])))
    losses = torch.where(is_good, of_good, of_bad)[counted[:, 0]]
    return ((losses.sum(), counted[:, 0].sum()),)


def contrast_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """Cross-entropy of each query's positive; the batch is a whole global batch."""
    ids, seen = (batch[n].flatten(0, 1) for n in ("input_ids", "attention_mask"))
    hidden = model(input_ids=ids, attention_mask=seen)[0].float()
    rows = torch.arange(len(ids))
    if loss["pooling"] == "mean":
        vectors = (hidden * seen.unsqueeze(-1)).sum(1) / seen.sum(1, keepdim=True)
    else:
        vectors = hidden[rows, 0 if loss["pooling"] == "cls" else seen.sum(1) - 1]
    query, *others = F.normalize(vectors, dim=-1).view(*batch["input_ids"].shape[:2], -1).unbind(1)
    logits = float(loss["scale"]) * query @ torch.cat(others).T
    total = F.cross_entropy(logits, torch.arange(len(query)), reduction="sum")
    return ((total, torch.tensor(len(query))),)


def log_probs(model: Any, batch: Batch) -> Tensor:
    labels = batch["labels"]
    logits = causal_logits(model, batch).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
    return -losses.double().sum(-1)


REFERENCES: list[Any] = []


def reference_of(loss: dict[str, Any]) -> Any:
    """The model that the run began with; loaded once."""
    if not REFERENCES:
        found = load_model(Path(loss["reference"]), {}, [])
        round_(found, loss["quantized"])
        for folder in loss["merged"]:
            from peft import PeftModel

            found = PeftModel.from_pretrained(found, folder).merge_and_unload().eval()
        if loss["reference_adapter"]:
            from peft import PeftModel

            found = PeftModel.from_pretrained(found, loss["reference_adapter"]).eval()
        REFERENCES.append(found)
    return REFERENCES[0]


def odds_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """ORPO: the likelihood of each chosen text, and the odds of a token of both answers."""
    losses = []
    for pair in pairs_in(batch):
        chosen, rejected = (token_log_probs(model, *text) for text in pair)
        odds = [log_probs.mean().expm1().neg().log() for _, log_probs in (chosen, rejected)]
        gain = chosen[1].mean() - odds[0] - rejected[1].mean() + odds[1]
        nll = chosen[0 if loss["nll_of_prompts"] else 1].mean().neg()
        losses.append(nll + float(loss["beta"]) * F.softplus(-gain))
    return ((torch.stack(losses).sum() if losses else torch.zeros(()), torch.tensor(len(losses))),)


def lengths_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """SimPO: means over the tokens of each answer, a margin of gamma apart."""
    losses, smoothing = [], float(loss["label_smoothing"])
    for pair in pairs_in(batch):
        chosen, rejected = (token_log_probs(model, *text)[1].mean() for text in pair)
        margin = float(loss["beta"]) * (chosen - rejected) - float(loss["gamma"])
        wrong = F.softplus(margin)
        losses.append((1 - smoothing) * F.softplus(-margin) + smoothing * wrong)
    return ((torch.stack(losses).sum() if losses else torch.zeros(()), torch.tensor(len(losses))),)


def pairs_in(batch: Batch) -> Iterator[tuple[tuple[Tensor, Tensor], ...]]:
    """Ids and labels of both texts of each pair of which both have an answer."""
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        if (labels != IGNORE_INDEX).any(-1).all():
            yield tuple(zip(ids, labels, strict=True))


def token_log_probs(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens after a text's first, and of its answer's."""
    places = (labels != IGNORE_INDEX).nonzero().flatten()
    last = int(places.max())
    text = torch.cat([ids[: last + 1], labels[last : last + 1]])
    logits = causal_logits(model, {"input_ids": text[:-1].unsqueeze(0)})[0]
    every = -F.cross_entropy(logits.double(), text[1:], reduction="none")
    return every, every[places]


def reward_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """-log sigmoid of the difference of a pair's rewards less its margin, and their squared sum."""
    rewards = classified(model, batch).view(-1, 2)
    losses = F.softplus(rewards[:, 1] - rewards[:, 0] + batch.get("margin", 0.0))
    losses = losses + float(loss["center_coefficient"]) * rewards.sum(1) ** 2
    counted = (batch["labels"] != IGNORE_INDEX).any(-1).all(-1)
    return ((losses[counted].sum(), counted.sum()),)


def class_loss(model: Any, batch: Batch, loss: dict[str, Any]) -> Sums:
    """Cross-entropy of the classes of texts, or of the tokens with a label."""
    labels = batch["labels"].flatten()
    logits = classified(model, batch).flatten(0, -2)
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    return ((total, (labels != IGNORE_INDEX).sum()),)


def classified(model: Any, batch: Batch) -> Tensor:
    """Logits of texts that end where `padding_mask` is 0, padded as the configuration says."""
    mask = batch["padding_mask"].flatten(0, -2)
    pad = int(model.config.get_text_config().pad_token_id)
    ids = batch["input_ids"].flatten(0, -2).where(mask.bool(), pad)
    logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits.double()


WAYS = {
    "reward": reward_loss,
    "classify": class_loss,
    "orpo": odds_loss,
    "simpo": lengths_loss,
    "causal": causal_loss,
    "own": own_loss,
    "function": function_loss,
    "dpo": preference_loss,
    "kto": rated_loss,
    "embed": contrast_loss,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
