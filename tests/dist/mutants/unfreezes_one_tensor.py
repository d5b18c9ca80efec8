"""One tensor of the freeze set trains."""

from colotrain.engine.build import transforms as engine
from colotrain.verify import worker

freeze = engine.freeze_


def freeze_(model, plan, *, step=0):
    frozen = freeze(model, plan, step=step)
    name = sorted(frozen)[0]
    model.get_parameter(name).requires_grad_(True)
    return frozen


def main(path: str, *digests: str) -> int:
    engine.freeze_ = freeze_
    return worker.main(path, *digests)
