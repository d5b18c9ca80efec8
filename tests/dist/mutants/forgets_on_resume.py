"""A run that goes on from a checkpoint begins with no moments of its optimizer."""

from colotrain.engine.state.choosing import StartingPoint
from colotrain.verify import worker

restore = StartingPoint.restore_


def restore_and_forget_(self, run):
    restore(self, run)
    if self.resumed is not None:
        run.optimizer.forget_state_(run.optimizer.parameters)


def main(path: str, *digests: str) -> int:
    StartingPoint.restore_ = restore_and_forget_
    return worker.main(path, *digests)
