"""DeepSpeed on its CPU accelerator: ZeRO stages 0 to 3."""

from __future__ import annotations

import deepspeed
from workload import OPTIMIZER, Meter, Model, arguments, batches, ranks


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    rank, world_size = ranks()
    deepspeed.init_distributed(dist_backend="gloo")
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": asked.micro_batch,
        "gradient_accumulation_steps": asked.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(asked.variant.removeprefix("zero"))},
        "optimizer": {"type": "AdamW", "params": OPTIMIZER | {"torch_adam": True}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    data = batches(asked.micro_batch, rank=rank, world_size=world_size)
    for _ in range(asked.steps):
        for _ in range(asked.accumulation):
            engine.backward(engine(**next(data)))
            engine.step()
        meter.step()
    meter.finish(rank)


if __name__ == "__main__":
    main()
