"""A smoke run: the plan in the smallest size that still uses all of its parts.

It has two steps of the smallest global batch on short samples. The ranks exit after the first
step, and new ones resume from its checkpoint.
"""

from __future__ import annotations

import copy
import re
import time
from typing import Any

from colotrain.spec.plan import RunPlan

STEPS = 2
SEQ_LEN = 128
"""Most tokens per sample; a user's own dataset is not shortened."""


def shrink(config: dict[str, Any], plan: RunPlan) -> dict[str, Any]:
    """The configuration of the smoke run of `config`, which resolved to `plan`.

    Plugin, ranks, precision, freezing, adapters and the learning rate of the first steps stay the
    same. Later events (unfreezing, gradient records) are moved into the two steps.
    """
    small = copy.deepcopy(config)
    batch = plan.batch
    steps = min(batch.accumulation_steps, 2)
    micro_batch = min(batch.micro_batch, 2 if plan.data.related else 1)  # texts to tell apart
    small["name"] = smoke_name(config, plan)
    small["plugin"]["name"] = plan.plugin.name
    small["cluster"]["procs_per_node"] = plan.cluster.procs_per_node
    small["elastic"] |= {"max_restarts": 0, "min_nodes": None, "max_nodes": None}
    small["elastic"] |= {"replace_slow": False, "spare_nodes": 0}
    unit = plan.mesh.token_unit
    small["data"]["seq_len"] = min(plan.data.seq_len, max(SEQ_LEN // unit, 1) * unit)
    small["accumulate"]["steps"] = steps
    small["train"] |= {
        "max_steps": STEPS,
        "epochs": None,
        "global_batch": steps * batch.data_parallel * micro_batch,
        "micro_batch": micro_batch,
        "eval_every": None,  # evaluations before the first step and after the last
        "eval_steps": int(plan.train.eval_steps != 0),
        "profile": {},
    }
    small["optim"]["schedule"] |= {
        "warmup_steps": plan.optim.warmup_steps,
        "warmup_ratio": None,
    }
    small["runs_dir"] = None
    small["checkpoint"] |= {"every": 1, "keep": 1, "resume": "auto"}
    small["observe"] |= {"log_every": 1, "trackers": [], "metrics_port": None, "notify": {}}
    for section, name in (("observe", "grads_every"), ("elastic", "check_every")):
        small[section][name] = 1 if small[section][name] else small[section][name]
    later = list(plan.freeze.scheduled)
    small["freeze"]["unfreeze"] = {"1": later} if later else {}
    return small


def smoke_name(config: dict[str, Any], plan: RunPlan) -> str:
    """Unique name, as `NAME-smoke-20260131-235959`.

    Nodes that users start find one another by the name; there it is `NAME-smoke`.
    """
    if config["cluster"]["rdzv_endpoint"] is not None:
        return f"{plan.name}-smoke"
    stem = plan.name if config["name"] else re.sub(r"-\d{8}-\d{6}$", "", plan.name)
    return f"{stem}-smoke-{time.strftime('%Y%m%d-%H%M%S')}"
