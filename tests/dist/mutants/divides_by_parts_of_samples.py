"""A rank that has part of a sample counts the targets of the whole sample."""

from colotrain.models.llm import LLM
from colotrain.verify import worker

forward = LLM.forward


def counting_the_whole(self, input_ids, labels=None, document_ids=None):
    output = forward(self, input_ids, labels, document_ids)
    return output if labels is None else (output[0], (labels != -100).sum())


def main(path: str, *digests: str) -> int:
    LLM.forward = counting_the_whole
    return worker.main(path, *digests)
