"""A smoke run: the plan as it is, in the smallest shape that still goes through all of it.

Two steps of the least global batch on short samples; the ranks leave after the first step, and
new ones resume the second from its checkpoint.
"""

from __future__ import annotations

import copy
import re
import time
from typing import Any

from colotrain.spec.plan import RunPlan

STEPS = 2
SEQ_LEN = 128
"""Tokens per sample at most; datasets of the user's own give what they give."""


def shrink(config: dict[str, Any], plan: RunPlan) -> dict[str, Any]:
    """`config`, which resolved to `plan`, in its smoke run's shape.

    The plugin, the ranks, the precision, what is frozen, adapters and the learning rate of the
    first steps stay. Whatever would happen later (unfreezing, gradient records) happens within the
    two steps.
    """
    small = copy.deepcopy(config)
    batch = plan.batch
    steps = min(batch.accumulation_steps, 2)
    small["name"] = smoke_name(config, plan)
    small["plugin"]["name"] = plan.plugin.name
    small["cluster"]["procs_per_node"] = plan.cluster.procs_per_node
    small["elastic"] |= {"max_restarts": 0, "min_nodes": None, "max_nodes": None}
    small["data"]["seq_len"] = min(plan.data.seq_len, SEQ_LEN)
    small["accumulate"]["steps"] = steps
    small["train"] |= {
        "max_steps": STEPS,
        "epochs": None,
        "global_batch": steps * batch.data_parallel,
        "micro_batch": 1,
        "eval_every": None,  # there is an evaluation before the first step and after the last
        "eval_steps": min(plan.train.eval_steps, 1),
    }
    small["optim"]["schedule"] |= {
        "warmup_steps": plan.optim.warmup_steps,
        "warmup_ratio": None,
    }
    small["checkpoint"] |= {"every": 1, "keep": 1, "resume": "auto"}
    small["observe"] |= {"log_every": 1, "trackers": []}
    for section, name in (("observe", "grads_every"), ("elastic", "check_every")):
        small[section][name] = 1 if small[section][name] else small[section][name]
    later = [glob for globs in plan.freeze.unfreeze.values() for glob in globs]
    small["freeze"]["unfreeze"] = {"1": later} if later else {}
    return small


def smoke_name(config: dict[str, Any], plan: RunPlan) -> str:
    """`NAME-smoke-20260131-235959`, which no other run has.

    Nodes that are started by hand find one another by the name, which is `NAME-smoke` there.
    """
    if config["cluster"]["rdzv_endpoint"] is not None:
        return f"{plan.name}-smoke"
    stem = plan.name if config["name"] else re.sub(r"-\d{8}-\d{6}$", "", plan.name)
    return f"{stem}-smoke-{time.strftime('%Y%m%d-%H%M%S')}"
