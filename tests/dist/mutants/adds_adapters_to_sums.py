"""The product of an adapter is also added to the sum over the ranks that divide its layer."""

from colotrain.models import adapters
from colotrain.verify import worker


def main(path: str, *digests: str) -> int:
    adapters.leave_to_forward_ = lambda layer: None
    return worker.main(path, *digests)
