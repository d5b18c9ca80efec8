"""Checking an export: what transformers and PEFT compute with it is what the run computed.

`export.reader` computes in a process of its own. Here is what it is asked, what its answer is
compared with, and the receipt about it beside the weights.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from colotrain.current_folder import places_of_code
from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.conversations import trained_template
from colotrain.data.prepare.tokens import decode, prepare_all
from colotrain.engine.state.checkpoint import step_of
from colotrain.engine.state.manifest import read_manifest
from colotrain.errors import ColotrainError, UsageError
from colotrain.events.kinds import Evaluation
from colotrain.events.log import event_files, read
from colotrain.export import llama, reader
from colotrain.export.job import OWN_CONFIG, call_of, on_meta, write_json
from colotrain.export.own_outputs import (
    computes_in_float32,
    evaluation_batches,
    evaluation_loader,
    first_rows,
    in_float32,
    outputs_of,
    own_model,
)
from colotrain.export.receipt import (
    RECEIPT,
    changed_call,
    changed_files,
    check_regular,
    code_of,
    digests,
    exported_files,
    named_base,
    read_receipt,
)
from colotrain.export.source import CheckpointTensors
from colotrain.export.stream import NAMES
from colotrain.models.adapters import PREFIX, SETTINGS, WEIGHTS
from colotrain.models.huggingface_images import joined_images
from colotrain.models.quantized.layers import packed_weights
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.objectives import (
    DPO,
    KTO,
    ORPO,
    ClassifyPlan,
    DistillPlan,
    EmbedPlan,
    Head,
    RewardPlan,
    SimPO,
)
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import format_seconds

NUM_SAMPLES = 4
"""Samples whose logits are compared."""
PROBE_LENGTH = 12
LEAST_S, MOST_S = 600.0, 7 * 86_400.0
"""Bounds of the seconds for which a check waits for the reader."""
READ_BYTES_PER_S = 5e6
"""Bytes that the reader loads in a second, on a slow disk."""
COMPUTED_PER_READ = 0.01
"""Seconds for a value of a sample in the model, by those for loading the model."""
EXACT, ROUNDED = 1e-4, 2e-2
"""Largest differences, relative to the largest value: in float32, and where a run computed in, or
an export rounds to, half precision."""


@dataclass(slots=True, kw_only=True)
class _Question:
    """What the reader is asked, and what its answer is to be."""

    request: dict[str, Any]
    tensors: dict[str, Tensor]
    outputs: list[Tensor]
    """The own model's outputs of the samples."""
    is_precise: bool
    """Whether the run computed in float32 or wider."""
    run_loss: Evaluation | None
    token_ids: list[list[int]]
    template: str | None
    notes: list[str]


def check(
    rundir: RunDir, plan: RunPlan, checkpoint: Path, folder: Path, *, repeat: str
) -> dict[str, Any]:
    """Check an exported directory against its run, and write `receipt.json` into it.

    `plan` is the run's, as it was checked. `repeat` is the command that does so again. Raises
    `UsageError` for a directory that is no export, or cannot be checked.
    """
    problems, kind = changed_files(folder), kind_of(folder)
    _refuse(plan, kind)
    question = _ask(rundir, plan, checkpoint, folder, kind)
    answer, outputs = read_apart(question.request, question.tensors)
    problems += [*changed_call(folder, plan, kind), *answer["problems"]]
    exported = exported_files(folder)
    precise = question.request["dtype"] in ("float32", "float64")
    limit = EXACT if precise and question.is_precise else ROUNDED
    loss = _compare_loss(question, answer, limit)
    logits = _compare_outputs(question, outputs)
    problems += [p["problem"] for p in (loss, logits) if p.get("problem")]
    problems += _compare_tokenizer(question, answer["tokenizer"])
    tokenizer = {n: v for n, v in answer["tokenizer"].items() if n.endswith("sha256")}
    receipt = {
        "schema": 1,
        "passed": not problems,
        "problems": problems,
        "notes": question.notes,
        "run": {"name": plan.name, "path": str(rundir.path), "step": step_of(checkpoint)},
        "format": kind,
        "base_quantized": question.request["quantized"] if kind == "peft" else None,
        "dtype": question.request["dtype"],
        "validation_loss": loss,
        "outputs": logits,
        "tokenizer": tokenizer,
        "probe": {
            "input_ids": question.request["probe"],
            "logits": answer.get("probe", []),
            "meaning": "logsumexp and the first 8 logits after the last token",
        },
        "data": read_manifest(checkpoint).sources,
        "code": code_of(plan),
        "read_with": answer["versions"],
        "files": exported or ({} if problems else digests(folder)),
        "repeat": repeat,
    }
    write_json(folder / RECEIPT, receipt)
    return receipt


def recheck(folder: Path, *, note: str, loads_base: bool) -> dict[str, Any]:
    """Check a directory by its receipt alone: its files, and the logits after a few tokens.

    No class of the user's own is called, and with `loads_base` alone the base of an adapter is
    loaded: the directory, which names them, may be anybody's. Returns the receipt with what was
    found now; nothing is written. `note` says why the run is not used.
    """
    receipt, notes = read_receipt(folder), [note]
    problems = changed_files(folder, alone=True)
    kind = kind_of(folder)
    if receipt["format"] != kind:
        problems.append(
            f"the receipt is of the format {receipt['format']}, the directory of {kind}"
        )
    request = _request(folder, kind, probe=receipt["probe"]["input_ids"])
    outputs: dict[str, Any] = {"kind": None, "samples": None, "largest_difference": None}
    if kind == "own":
        notes.append("the model's class is not called: only files are compared")
    elif kind == "peft":
        base, request["quantized"] = named_base(folder), receipt.get("base_quantized")
        request["base"] = base if loads_base else None
        if not loads_base:
            request["probe"] = []
            notes.append(
                f"the adapter's base, {base}, is not loaded: only files and tokenizer are compared "
                "(--trust-code loads it)"
            )
    if kind != "own":
        answer, _ = read_apart(request, {})
        problems += answer["problems"]
        problems += _changed_tokenizer(receipt["tokenizer"], answer["tokenizer"])
    if kind != "own" and request["probe"]:
        outputs = _compare_probe(receipt["probe"]["logits"], answer.get("probe", []))
        problems += [outputs["problem"]] if "problem" in outputs else []
    now = {"notes": notes, "outputs": outputs, "validation_loss": {"run": None, "export": None}}
    return {**receipt, **now, "passed": not problems, "problems": problems}


def _compare_probe(then: list[list[float]], now: list[list[float]]) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": "logits after a few tokens", "samples": len(then)}
    if [*map(len, then)] != [*map(len, now)]:
        problem = "no logits can be computed after a few tokens"
        return {**told, "largest_difference": None, "problem": problem}
    pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(then, now, strict=True) if a]
    distances = [_largest_difference(a, b) for a, b in pairs]
    allowed = [EXACT * max(1.0, a.abs().nan_to_num().max().item()) for a, _ in pairs]
    largest = max(distances, default=0.0)
    if any(distance > most for distance, most in zip(distances, allowed, strict=True)):
        told["problem"] = f"the logits after a few tokens differ by {largest:.3g}"
    return {**told, "largest_difference": largest if math.isfinite(largest) else None}


def _changed_tokenizer(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"the tokenizer's {name} is {now.get(name)}, not {value}"
        for name, value in then.items()
        if now.get(name) != value
    ]


def kind_of(folder: Path) -> str:
    """hf, peft or own: how an exported directory is loaded."""
    for name, kind in ((SETTINGS, "peft"), (OWN_CONFIG, "own"), ("config.json", "hf")):
        if (folder / name).is_file():
            return kind
    raise UsageError(f"{folder}: is no export of colotrain", "name one that `export` wrote")


def _refuse(plan: RunPlan, kind: str) -> None:
    if kind == "peft" and plan.model.hf is None:
        raise UsageError(
            "--check: the base of the adapter is made by model.target, which PEFT does not load",
            "check the merged export (leave out --adapter)",
        )
    if kind == "own" and plan.model.hf is not None:
        raise UsageError(
            "--check: tensors alone are loaded by no program", "check an export of --format hf"
        )
    missing = {"hf": ["transformers"], "peft": ["transformers", "peft"], "own": []}[kind]
    for name in missing:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--check: {name} is not installed", "pip install 'colotrain[hf]'")


def _ask(rundir: RunDir, plan: RunPlan, checkpoint: Path, folder: Path, kind: str) -> _Question:
    step, notes = step_of(checkpoint), list[str]()
    # not the call that the directory names, which may be anybody's
    request = _request(folder, kind) | call_of(plan.model)
    request["base"] = plan.model.hf
    if plan.model.quantize is not None and plan.model.hf is not None:
        weights = sorted(packed_weights(on_meta(plan.model)).items())
        request["quantized"] = {
            name.removesuffix(".weight"): f"{weight.scheme.name} of "
            + str(weight.dtype).removeprefix("torch.")
            for name, weight in weights
        }
    dtype = written_dtype(folder)
    request["dtype"] = str(dtype).removeprefix("torch.")
    loader = evaluation_loader(plan)
    evaluated = None if loader is None else evaluation_of(rundir, step)
    request["loss"] = {**_loss_of(plan, kind, notes), "quantized": request["quantized"]}
    request["import_from"] = places_of_code() if _calls_own_code(request) else []
    if loader is None:
        notes.append(
            "the run has no validation data: only outputs of training samples are compared"
        )
    elif evaluated is None:
        notes.append(f"the run was not evaluated at step {step}: only outputs are compared")
    elif request["loss"]["kind"] == "none":
        evaluated = None
    rows = [joined_images(row) for row in first_rows(plan, loader, NUM_SAMPLES)]
    is_causal, head = _is_causal(plan, kind), plan.model.head
    has_loss = request["loss"]["kind"] != "none"
    own = "loss" if kind == "own" and has_loss else "logits"
    request["outputs"] = "causal" if is_causal else own
    samples = [
        _inputs(row, labels=has_loss and not is_causal) if head is None else scored(row, head)
        for row in rows
    ]
    if plan.data.images:
        samples = [{n: t for n, t in row.items() if n != "labels"} for row in rows]
    tensors = {f"sample/{i}/{n}": t for i, s in enumerate(samples) for n, t in s.items()}
    if evaluated is not None and loader is not None:
        for index, batch in enumerate(evaluation_batches(loader)):
            tensors |= {f"batch/{index}/{n}": t for n, t in joined_images(batch).items()}
    stored = CheckpointTensors(checkpoint)
    beside_base = adapter_names(folder) if kind == "peft" else ()
    model = own_model(plan, stored, written=dtype, beside_base=beside_base)
    is_precise = plan.train.precision in ("fp32", "fp64") and computes_in_float32(model)
    model = in_float32(model, plan, beside_base=beside_base)
    outputs = [outputs_of(model, sample, request) for sample in samples]
    if kind == "peft":  # the run may have made another model of the base than its config.json says
        architecture = type(model).__name__
        made = json.loads(model.config.to_json_string(use_diff=False))
        request["base_config"] = {**made, "architectures": [architecture]}
    if is_causal:
        vocab = outputs[0].numel() // samples[0]["input_ids"].numel()
        draws = torch.Generator().manual_seed(plan.train.seed)
        ids = torch.randint(vocab, (2, PROBE_LENGTH), generator=draws)
        request["probe"] = ids.tolist()
    texts, token_ids = _texts(plan, samples) if kind != "own" else ([], [])  # it has no tokenizer
    request["texts"] = texts
    return _Question(
        request=request,
        tensors=tensors,
        outputs=outputs,
        is_precise=is_precise,
        run_loss=evaluated,
        token_ids=token_ids,
        template=trained_template(plan.data),
        notes=notes,
    )


def _request(folder: Path, kind: str, *, probe: list[list[int]] | None = None) -> dict[str, Any]:
    return {
        "folder": str(folder.absolute()),
        "kind": kind,
        "base": None,
        "base_config": None,
        "quantized": None,
        "import_from": [],
        "outputs": "causal",
        "loss": {"kind": "none"},
        "probe": probe or [],
        "texts": [],
        "dtype": "float32",
    }


def _loss_of(plan: RunPlan, kind: str, notes: list[str]) -> dict[str, Any]:
    """How the reader computes the loss of a batch."""
    model = plan.model
    if isinstance(model.objective, DistillPlan):
        notes.append("the loss of a distillation is not repeated: only outputs are compared")
        return {"kind": "none"}
    if isinstance(model.objective, EmbedPlan):
        return {"kind": "embed", **to_plain(model.objective)}
    if isinstance(model.objective, DPO | KTO):
        if model.hf is None:
            notes.append("the reference of the preferences is no directory: only outputs compared")
            return {"kind": "none"}
        adapter = model.adapter
        reference = {
            "reference": model.hf,
            "merged": [merged.path for merged in adapter.merge] if adapter else [],
            "reference_adapter": adapter.path if adapter else None,
        }
        return {"kind": model.objective.section, **to_plain(model.objective), **reference}
    if isinstance(model.objective, ORPO | SimPO) and kind == "own":
        notes.append("the loss of pairs is not repeated for tensors: only outputs are compared")
        return {"kind": "none"}
    if isinstance(model.objective, ORPO | SimPO | RewardPlan):
        return {"kind": model.objective.section, **to_plain(model.objective)}
    if isinstance(model.objective, ClassifyPlan):
        return {"kind": "classify"}
    if model.loss is not None and model.target == llama.TARGET and kind == "hf":
        notes.append("train.loss takes the outputs of model.target: only outputs are compared")
        return {"kind": "none"}
    about = {"ignored": plan.train.ignore_index, "is_hf": model.hf is not None}
    if model.loss is not None:
        return {"kind": "function", "function": model.loss, **about}
    return {"kind": "causal" if _is_causal(plan, kind) else "own", **about}


def _is_causal(plan: RunPlan, kind: str) -> bool:
    """Whether the export has logits, and labels are shifted, as transformers' causal models do."""
    if plan.model.hf is None:
        return plan.model.target == llama.TARGET and kind != "own"
    from colotrain.models.huggingface import build, predicts_next

    return predicts_next(build(plan.model))


def _inputs(row: dict[str, Tensor], *, labels: bool) -> dict[str, Tensor]:
    """What a model gets of a sample: all, or without `labels`, and each row as a sample."""
    if labels and row.get("input_ids", torch.empty(0)).ndim < 3:
        return row
    inputs = {n: row[n] for n in ("input_ids", "attention_mask", "document_ids") if n in row}
    return {n: t.flatten(0, 1) if t.ndim > 2 else t for n, t in inputs.items()}


def scored(row: dict[str, Tensor], head: Head) -> dict[str, Tensor]:
    """What a classifier gets of a sample, whose texts end where its `padding_mask` is 0."""
    ids, mask = (row[n].flatten(0, -2) for n in ("input_ids", "padding_mask"))
    return {"input_ids": ids.where(mask.bool(), head.pad_id), "attention_mask": mask}


def _texts(plan: RunPlan, samples: list[dict[str, Tensor]]) -> tuple[list[str], list[list[int]]]:
    """Texts of samples, and the tokens that the run's tokenizer makes of them."""
    if plan.data.source == "target":
        return [], []
    prepared = prepare_all(plan.data)[0]
    source = prepared.tokenizer or vocabulary.tokenizer_file(plan.data.tokenizer) or "bytes"
    texts = [decode(source, s["input_ids"].flatten().tolist()) for s in samples]
    if source == "bytes":
        return texts, [list(text.encode()) for text in texts]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return texts, [tokenizer.encode(text).ids for text in texts]


def evaluation_of(rundir: RunDir, step: int) -> Evaluation | None:
    """The run's last evaluation of a step."""
    found = None
    for path, _, _ in event_files(rundir, ranks={0}):
        for event in read(path, rundir.open):
            if event.kind == Evaluation.KIND:
                evaluation = Evaluation.of(event)
                if evaluation.step == step and evaluation.loss is not None:
                    found = evaluation
    return found


def written_dtype(folder: Path) -> torch.dtype:
    """The floating-point dtype of most tensors in the files."""
    counts: dict[torch.dtype, int] = {}
    dtypes = {name: dtype for dtype, name in NAMES.items() if dtype.is_floating_point}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  no mapping
                    part = file.get_slice(name)
                    if (dtype := dtypes.get(part.get_dtype())) is not None:
                        counts[dtype] = counts.get(dtype, 0) + math.prod(part.get_shape())
        except SafetensorError as error:
            raise UsageError(f"{path}: cannot be read ({error})", "export the run again") from error
    if not counts:
        raise UsageError(f"{folder}: has no weights", "export the run again")
    return max(counts, key=lambda dtype: counts[dtype])


def adapter_names(folder: Path) -> set[str]:
    """The tensors in the file of an adapter, without PEFT's prefix."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        return {name.removeprefix(PREFIX) for name in file.keys()}  # noqa: SIM118


def read_apart(
    request: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], list[Tensor]]:
    """What the reader, in a new process, answers: numbers by name, and outputs of the samples."""
    with tempfile.TemporaryDirectory(prefix="colotrain-check-") as name:
        work = Path(name)
        asked = {**request, "has_samples": bool(tensors)}
        (work / "request.json").write_text(json.dumps(asked), "utf-8")
        if tensors:
            save_file({n: t.contiguous() for n, t in tensors.items()}, work / "samples.safetensors")
        command = [sys.executable, "-P", str(reader.__file__), str(work)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        seconds = _bound_s(request, tensors)
        try:
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as error:
            read = " and ".join(map(str, _folders_of(request)))
            raise ColotrainError(
                f"--check: the process that reads {read} did not end in {format_seconds(seconds)}",
                "look at what is slow: the disk, or too little memory",
            ) from error
        if done.returncode or not (work / "answer.json").is_file():
            last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise ColotrainError(f"--check: the process that reads the export failed: {last}")
        answer: dict[str, Any] = json.loads((work / "answer.json").read_text("utf-8"))
        if answer["foreign"] and not _calls_own_code(request):
            raise ColotrainError(f"--check: the reader has loaded {', '.join(answer['foreign'])}")
        path = work / "outputs.safetensors"
        outputs = load_file(path) if path.is_file() else {}
    return answer, [outputs[str(number)] for number in range(len(outputs))]


def _calls_own_code(request: dict[str, Any]) -> bool:
    return request["kind"] == "own" or request["loss"]["kind"] == "function"


def _folders_of(request: dict[str, Any]) -> list[Path]:
    """The directories that the reader loads models from."""
    base = request["base"] if request["kind"] == "peft" else None
    named = (request["folder"], base, request["loss"].get("reference"))
    return [Path(folder) for folder in named if folder is not None]


def _bound_s(request: dict[str, Any], tensors: dict[str, Tensor]) -> float:
    """Most seconds of the reader, for what it reads and for the samples that it computes with.

    Raises `UsageError` for directories with a FIFO or a device.
    """
    num_bytes = 0
    for folder in _folders_of(request):
        check_regular(folder)
        num_bytes += sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    num_values = sum(tensor.numel() for tensor in tensors.values())
    seconds = num_bytes / READ_BYTES_PER_S * (1 + num_values * COMPUTED_PER_READ)
    return min(LEAST_S + seconds, MOST_S)


def _compare_loss(question: _Question, answer: dict[str, Any], tolerance: float) -> dict[str, Any]:
    evaluated = question.run_loss
    if evaluated is None or evaluated.loss is None:
        return {"run": None, "export": None}
    told: dict[str, Any] = {
        "run": evaluated.loss,
        "targets": evaluated.tokens,
        "tolerance": tolerance,
    }
    found = [total / (count or 1.0) for total, count in answer.get("losses", [])]
    if not found:
        return {**told, "export": None, "problem": "no validation loss can be computed"}
    loss = min(found, key=lambda value: abs(value - float(evaluated.loss or 0.0)))
    difference = abs(loss - evaluated.loss)
    told |= {"export": loss, "difference": difference}
    if not difference <= tolerance * max(1.0, abs(evaluated.loss)):
        told["problem"] = (
            f"the validation loss is {loss:.6g}, and was {evaluated.loss:.6g} in the run"
        )
    return told


def _compare_outputs(question: _Question, outputs: list[Tensor]) -> dict[str, Any]:
    kind = "losses" if question.request["outputs"] == "loss" else "logits"
    told: dict[str, Any] = {"kind": kind, "samples": len(question.outputs), "tolerance": EXACT}
    if len(outputs) != len(question.outputs):
        return {**told, "largest_difference": None, "problem": f"no {kind} can be computed"}
    largest = worst = 0.0
    for wanted, found in zip(question.outputs, outputs, strict=True):
        if wanted.shape != found.shape:
            sizes = f"{found.numel()} {kind} of a sample, not {wanted.numel()}"
            return {**told, "largest_difference": None, "problem": sizes}
        difference = _largest_difference(wanted, found)
        size = max(1.0, wanted.abs().nan_to_num().max().item())
        largest, worst = max(largest, difference), max(worst, difference / size)
    told["largest_difference"] = largest if math.isfinite(largest) else None
    if not worst <= EXACT:
        told["problem"] = f"{kind} differ from the run's by up to {largest:.3g}"
    return told


def _largest_difference(wanted: Tensor, found: Tensor) -> float:
    """Largest distance of two values; infinite where one alone of them is no number."""
    is_same = wanted.eq(found) | (wanted.isnan() & found.isnan())
    distances = (wanted.double() - found.double()).abs().nan_to_num(nan=math.inf)
    return distances.masked_fill(is_same, 0.0).max().item()


def _compare_tokenizer(question: _Question, told: dict[str, Any]) -> list[str]:
    problems = []
    if question.token_ids and not told:
        problems.append("there is no tokenizer that transformers loads")
    elif question.token_ids and told["ids"] != question.token_ids:
        problems.append("the tokenizer makes other tokens of the run's texts")
    if told and question.template is not None and told["template"] != question.template:
        problems.append("the chat template is not the one that the run trained with")
    return problems
