"""Trust in run directories: what a plan and a configuration from elsewhere may decide.

What this user writes into a run directory is signed with a key in the user's home, which no run
directory contains. Without a valid signature a run directory decides numbers, names and patterns
alone (`ALLOWED`). Everything else may name code, commands, addresses or files elsewhere: it needs
the signature, `--trust-code`, or the same value as an argument. So a directory can be moved,
renamed and shared, and one from elsewhere runs no code, reaches no address and reads no file.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from colotrain import signatures
from colotrain.errors import ConfigError, UsageError, shortened
from colotrain.records import as_argument, as_override, to_plain
from colotrain.rundir import OFFLOAD, RunDir, read_json, read_text, write_atomically
from colotrain.signatures import is_signed
from colotrain.spec.plan import OWN_MODELS, RunPlan

WORDS = r"[\w.+% -]*"
"""Words, sizes and durations: `cosine`, `512MiB`, `90%`, `0.5 epochs`."""
TEXT = r"(?s:.*)"
"""Texts that are patterns on names inside the model, or are only shown."""
NOTHING = r"(?!)"
ALLOWED = {
    **dict.fromkeys(("schema", "world_size", "batch", "accumulate", "smoke"), WORDS),
    **dict.fromkeys(("parameters", "memory", "peak", "time", "flops_per_token"), WORDS),
    **dict.fromkeys(("recipe", "memory_shape", "warnings"), TEXT),
    "name": r"\w[\w.-]*",
    "plugin": TEXT,
    "plugin.disk_path": "auto|none",
    "plugin.budget.disk_path": OFFLOAD,
    "mesh": TEXT,
    "model.target": "|".join(map(re.escape, OWN_MODELS)),
    **{f"model.objective.{key}": WORDS for key in ("beta", "top_k", "alpha", "temperature")},
    **{f"model.objective.{key}": WORDS for key in ("pooling", "scale", "negatives")},
    **{f"model.objective.{key}_weight": WORDS for key in ("desirable", "undesirable")},
    **{f"model.objective.{key}": WORDS for key in ("nll_of_prompts", "gamma", "label_smoothing")},
    **{f"model.objective.{key}": WORDS for key in ("center_coefficient", "pad_id")},
    "model.deferred_init": WORDS,
    "model.quantize": WORDS,
    "model.tokens": TEXT,
    "model.tp_plan": TEXT,
    "model.ep_plan": TEXT,
    "model.adapter": TEXT,
    "model.adapter.path": NOTHING,
    "model.adapter.merge": NOTHING,
    "adapter": TEXT,
    "adapter.path": NOTHING,
    "adapter.merge": NOTHING,
    **{
        f"data.{key}": WORDS
        for key in (
            *("source", "corpus", "format", "seq_len", "loss_on", "packing", "isolate", "on_bad"),
            *(
                "workers",
                "num_workers",
                "shuffle",
                "validation_fraction",
                "pairs",
                "masked",
                "margins",
            ),
            *("rated", "related", "images"),
        )
    },
    "data.tokenizer": r"auto|bytes|bpe-\d+",
    "data.chat_template": "chatml",
    "data.columns": TEXT,
    "data.tokens": TEXT,
    "data.marks_padding": WORDS,
    **{
        f"train.{key}": WORDS
        for key in (
            *("max_steps", "epochs", "epoch_steps", "last_batch", "num_validation", "seed"),
            *("global_batch", "micro_batch", "precision", "tf32", "compile", "grad_clip"),
            *("activation_checkpointing", "eval_every", "eval_steps", "eval_first"),
            *("on_nonfinite", "max_rollbacks", "objective", "dpo", "masking", "profile"),
            *("kto", "embed"),
            *("orpo", "simpo", "reward"),
            *("distill.top_k", "distill.alpha", "distill.temperature", "ignore_index"),
        )
    },
    "train.stop_early": TEXT,
    "train.classify": TEXT,
    "train.classify_tokens": TEXT,
    "data.classes": TEXT,
    "data.classes_of_words": WORDS,
    "data.classes_numbered": WORDS,
    "model.objective.classes_of_words": WORDS,
    "model.objective.class_names": TEXT,
    **{
        f"optim.{key}": WORDS
        for key in (
            *("name", "lr", "betas", "momentum", "eps", "weight_decay", "schedule", "rounding"),
            *("warmup_steps", "final_ratio", "decay_steps"),
        )
    },
    "optim.rules": TEXT,
    "freeze": TEXT,
    **{
        f"cluster.{key}": WORDS
        for key in (
            *("nodes", "procs_per_node", "device", "memory", "node_rank"),
            *("threads_per_rank", "threads_set_by", "memory_bytes"),
        )
    },
    "hardware": TEXT,
    "elastic": TEXT,
    "checkpoint": WORDS,
    "checkpoint.best": TEXT,
    "checkpoint.best_metric": TEXT,
    "checkpoint.resume": "auto|none",
    "observe.log_every": WORDS,
    "observe.grads_every": WORDS,
    "observe.samples": TEXT,
    "observe.trackers": "tensorboard",
}
"""Key or section of plans and configurations that anybody may set → pattern of its texts.

Numbers and truth values of these are allowed as well. What stands nowhere here is not allowed, and
a key has precedence over its section.
"""
SETTINGS = {
    "model.loss": "train.loss",
    "model.objective": "train.distill",
    "model.adapter": "adapter",
    "data.paths": "data.path",
    "data.validation_paths": "data.validation_path",
}
"""Key or section of a plan → setting that it comes from, where that has another name."""
MOST_OF_LIST = 1_500
"""Characters of settings that are shown whole, so that they can be given as arguments."""
MOST_NAMED = 8
MOST_OF_VALUE = 200
"""Settings that are shown of a longer list, and characters of each."""
TRUST_IT = "add --trust-code"
GIVE_IT = "give these settings as arguments"
KEEP_IT = "copy the file to recipes/NAME.yaml in your folder, where it is a recipe of your own"


def calls(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return key → value of what is not `ALLOWED` in a plan or a configuration as plain data."""
    model = plain.get("model")
    is_own = isinstance(model, Mapping) and model.get("target") in OWN_MODELS
    return {
        key: value
        for key, value in _leaves(plain, "")
        if not (is_own and key.startswith("model.args.")) and not _is_allowed(key, value)
    }


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value; lists are values."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _is_allowed(key: str, value: Any) -> bool:
    if value is None or value == "":
        return True
    if isinstance(value, Mapping):
        return all(_is_allowed(inner, item) for inner, item in _leaves(value, key))
    if isinstance(value, list | tuple):
        return all(_is_allowed(key, item) for item in value)
    known = key
    while known and known not in ALLOWED:
        known = known.rpartition(".")[0]
    pattern = ALLOWED.get(known, NOTHING)
    if isinstance(value, str):
        return re.fullmatch(pattern, value) is not None
    return pattern != NOTHING and isinstance(value, bool | int | float)


def write_signed(plan: RunPlan, rundir: RunDir, config: dict[str, Any] | None) -> None:
    """Write the plan and its configuration into the run directory and sign both."""
    rundir.write_plan(plan)
    text = None if config is None else _config_text(config)
    if text is not None:
        rundir.write(rundir.config_file, text)
    sign(rundir, plan, config=text)


def texts_of(plan: RunPlan, rundir: RunDir, config: dict[str, Any]) -> dict[Path, str]:
    """Return file → text of the plan and its configuration, as `write_signed` writes them."""
    return {rundir.plan_file: plan.to_json(), rundir.config_file: _config_text(config)}


def _config_text(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"  # JSON is valid YAML, so it works as a recipe


def read_files(rundir: RunDir) -> dict[Path, str]:
    """Return file → text of what `write_signed` wrote earlier."""
    files = (rundir.plan_file, rundir.config_file, rundir.signature_file)
    return {path: read_text(path, rundir.open) for path in files if path.is_file()}


def restore_files(before: dict[Path, str]) -> None:
    """Undo a `write_signed` whose settings trained nothing, so that plan and results match."""
    for path, text in before.items():
        write_atomically(path, text)


def sign(rundir: RunDir, plan: RunPlan, *, config: str | None = None) -> None:
    """Sign the plan, and `config` if given, as written by this user."""
    signatures.sign(
        rundir,
        {
            "plan": calls(to_plain(plan)),
            **({} if config is None else {"config": calls(json.loads(config))}),
        },
    )


def check(
    rundir: RunDir,
    plan: RunPlan,
    *,
    trusted: bool,
    only: Iterable[str] = (),
    given: Mapping[str, Any] | None = None,
    fix: str = TRUST_IT,
) -> None:
    """Raise `UsageError` if the plan names what it may not, and is not signed.

    `only`: keys or sections of the plan that matter; empty: all. `given`: settings that this user
    gave as arguments, by key. `fix`: what the user of this command can do.
    """
    _check_numbers(plan)
    if wrong := _refused(rundir, plan, trusted=trusted, only=only, given=given or {}):
        raise _refusal(rundir.plan_file, wrong, fix)


def check_resumed(
    rundir: RunDir, plan: RunPlan, *, trusted: bool, given: Mapping[str, Any]
) -> None:
    """Same as `check` for `resume` without settings; those that it advises are a configuration's.

    A plan has other keys than settings have, and with settings its configuration is composed anew.
    What the plan names is shown as well: that is what `--trust-code` lets it do.
    """
    from colotrain.config.compose import gather

    _check_numbers(plan)
    if wrong := _refused(rundir, plan, trusted=trusted, only=(), given=given):
        fix = TRUST_IT
        with suppress(UsageError):
            own = calls(gather([as_override(key, value) for key, value in given.items()])[0])
            saved = calls(read_config(rundir))
            named = {key: value for key, value in saved.items() if own.get(key) != value}
            if named:
                fix = f"{TRUST_IT}, or {GIVE_IT}: {_as_arguments(named)}"
        raise _refusal(rundir.plan_file, wrong, fix)


def _check_numbers(plan: RunPlan) -> None:
    """Raise `ConfigError` for numbers that no settings can have: they are in no signature."""
    from colotrain.config.checks import numbers_of_plan

    if problems := list(numbers_of_plan(to_plain(plan))):
        raise ConfigError(problems)


def _refused(
    rundir: RunDir,
    plan: RunPlan,
    *,
    trusted: bool,
    only: Iterable[str],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return setting → value of what the plan names and may not."""
    named = calls(to_plain(plan))
    if trusted or is_signed(rundir, "plan", named):
        return {}
    sections = tuple(only)
    return {
        _setting_of(key): value
        for key, value in named.items()
        if value not in (given.get(key), given.get(_setting_of(key)))
        and (not sections or any(key == s or key.startswith(f"{s}.") for s in sections))
    }


def _setting_of(key: str) -> str:
    """Return the setting that a plan's key comes from."""
    section = next((s for s in SETTINGS if key == s or key.startswith(f"{s}.")), "")
    return SETTINGS[section] + key.removeprefix(section) if section else key


def read_config(rundir: RunDir) -> dict[str, Any]:
    """Return the run's configuration: JSON, as `run` writes it."""
    file = rundir.config_file
    try:
        found = read_json(file, rundir.open)
    except FileNotFoundError:
        raise UsageError(f"{rundir.path}: has no {file.name}", "resume it unchanged") from None
    except (OSError, ValueError) as error:
        found = str(error)
    if not isinstance(found, dict):
        problem = f"{file}: is not as `colotrain run` writes it, so it is not read"
        raise UsageError(problem, f"look at it, and {KEEP_IT}")
    return found


def check_config(
    rundir: RunDir,
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any],
    trusted: bool,
    fix: str = f"{TRUST_IT}, or {GIVE_IT}",
) -> None:
    """Same as `check` for a configuration that was composed of `saved`, the run's, and arguments.

    `arguments` is what the arguments alone compose: what they say is this user's.
    """
    if trusted or is_signed(rundir, "config", calls(saved)):
        return
    own = calls(arguments)
    named = {key: value for key, value in calls(config).items() if own.get(key) != value}
    if named:
        raise _refusal(rundir.config_file, named, fix)


def _refusal(file: Path, named: Mapping[str, Any], fix: str) -> UsageError:
    """Return the error, which shows what a plan or a configuration names."""
    return UsageError(
        f"{file}: it names code, files or addresses ({_as_arguments(named)}), and was not written "
        "by you on this machine",
        f"look at what that is, then {fix}",
    )


def _as_arguments(named: Mapping[str, Any]) -> str:
    """Return arguments for a shell; where they are too long for a line, the first and shortened."""
    whole = " ".join(as_argument(key, value) for key, value in named.items())
    if len(whole) <= MOST_OF_LIST:
        return whole
    shown = [
        shlex.quote(shortened(as_override(key, value), MOST_OF_VALUE))
        for key, value in named.items()
    ]
    more = [f"and {len(shown) - MOST_NAMED} more"] if len(shown) > MOST_NAMED else []
    return " ".join([*shown[:MOST_NAMED], *more])
