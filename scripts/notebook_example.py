"""The Python API from end to end, as one would use it in a notebook, cell by cell.

    python scripts/notebook_example.py [picture.png]

Trains a small language model for a few steps, looks at its gradients, and draws both. Needs the
extra `plot`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import colotrain

SETTINGS = [
    "recipe=llm-tiny",
    "plugin=zero2",
    "model.args.d_model=32",
    "model.args.num_layers=3",
    "model.args.num_heads=2",
    "model.args.d_hidden=64",
    "data.seq_len=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.max_steps=30",
    "train.eval_steps=1",
    "observe.grads_every=5",
    "freeze.patterns=[embed*]",
]


def main(picture: Path) -> None:
    # %% What would it be?
    plan = colotrain.resolve(SETTINGS)
    print(
        f"{plan.name}: {plan.parameters.trainable:,} parameters train, on {plan.world_size} ranks"
    )

    # %% Train
    summary = colotrain.run([*SETTINGS, f"name={plan.name}"])
    print(
        f"{summary['status']}: loss {summary['loss']['first']:.3f} → {summary['loss']['last']:.3f}"
    )

    # %% Look at the gradients of the last record
    view = colotrain.read_run(plan.name)
    assert view.gradients is not None
    print(f"gradients of step {view.gradients.step}, norm {view.gradients.global_norm:.4f}")
    for gradient in view.gradients.parameters[:6]:
        shown = "-" if gradient.norm is None else f"{gradient.norm:.4f}"
        print(f"  {gradient.name:32} {gradient.status:8} {shown:>8}  {gradient.reason or ''}")

    # %% Draw
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    loss, norms = figure.subplots(1, 2)
    loss.plot(*zip(*view.loss, strict=True), label="training")
    loss.plot(*zip(*view.evals, strict=True), "o", label="validation")
    loss.set(xlabel="step", ylabel="loss")
    loss.legend()
    norms.plot(*zip(*view.grad_norms, strict=True))
    norms.set(xlabel="step", ylabel="gradient norm")
    figure.savefig(picture, dpi=120)
    print(f"{picture} is written")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run.png"))
