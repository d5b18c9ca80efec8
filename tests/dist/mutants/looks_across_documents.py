"""Ranks that divide samples forget the documents inside them."""

from colotrain.models.context_parallel import SequenceShard
from colotrain.verify import worker

begin = SequenceShard.begin


def without_documents(self, length, documents=None):
    begin(self, length)


def main(path: str, *digests: str) -> int:
    SequenceShard.begin = without_documents
    return worker.main(path, *digests)
