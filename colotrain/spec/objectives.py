"""The objectives that `train.objective` may name: settings, and what other rooms ask of each.

Standard library only; `models.objectives` has the losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from colotrain.spec.ranges import ABOVE_ZERO, AT_LEAST_ZERO, SHARE, Range, at_least

IGNORE_INDEX = -100
"""Label that losses leave out, as torch's do."""
PADDING_MASK = "padding_mask"
"""Entry of a sample that is 0 for the padding at its end."""
ROWS_OF = "rows_of_"
"""Beginning of the name of a batch's entry with each sample's number of rows of an entry of
images, such as `rows_of_pixel_values`: the entry itself is padded."""
MARGIN = "margin"
"""Entry of a pair: how much larger the reward of its chosen text is to be."""
GOOD = "is_good"
"""Entry of a sample that is 1 where its answer is a good one, and else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A new head in place of a model's own: a classifier, or one number for a text."""

    task: str
    """What it is for, as transformers calls it."""
    registry: str
    """Name of transformers' mapping of configurations to architectures with such a head."""
    size: int
    """Numbers that it returns for a text, or for a token."""
    pad_id: int
    """Token behind texts, which is not scored."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""


class Objective:
    """Properties of an objective in any run; those here are of the model's own loss.

    Its fields are its settings.
    """

    __slots__ = ()

    section: ClassVar[str]
    """Name of its settings under `train`."""
    ranges: ClassVar[Mapping[str, Range]] = {}
    """Setting → the numbers that it may have."""
    has_pairs: ClassVar[bool] = False
    """Whether samples are preference pairs."""
    has_rated_answers: ClassVar[bool] = False
    """Whether samples are answers with a label, which says whether they are good."""
    hides_tokens: ClassVar[bool] = False
    """Whether labels are tokens that are hidden from the model, instead of the next ones."""
    scores_tokens: ClassVar[bool] = False
    """Whether it needs the loss of every token by itself, which not every causal model gives."""

    relates_texts: ClassVar[bool] = False
    """Whether samples are several texts, of which the model makes vectors."""
    passes_before: ClassVar[int] = 0
    """Forwards without gradients of each micro-batch before a step's own, in which the loss of a
    sample gets to know the other samples of the global batch."""
    has_head: ClassVar[bool] = False
    """Whether the model gets a new head (`head`)."""

    has_classes: ClassVar[bool] = False
    """Whether samples are texts with a class each, or words with one each."""
    labels_words: ClassVar[bool] = False
    """Whether each word has a class."""

    @property
    def head(self) -> Head | None:
        """The model's new head; None: it keeps its own."""
        return None

    @property
    def teacher(self) -> str | None:
        """Directory of a second model, whose probabilities are learned; None: there is none."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking(Objective):
    """Masked language modelling."""

    section = "masking"
    ranges: ClassVar = {
        "probability": Range("a number above 0, and below 1", lambda value: 0 < value < 1)
    }
    hides_tokens = True

    probability: float = 0.15
    """Share of the tokens, special ones left out, that the model is to find. Of these 80 % are
    replaced by the tokenizer's mask token and 10 % by random tokens; 10 % stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPlan:
    """Masked language modelling: which tokens are hidden, and what stands in their place."""

    probability: float
    """Share of the tokens, special ones left out, that are targets."""
    mask_id: int
    pad_id: int
    begin_id: int | None
    """Token before the text of every sample, such as [CLS]; None: none."""
    end_id: int | None
    """Token after the text of every sample, such as [SEP]; None: none."""
    special_ids: tuple[int, ...]
    """Tokens that are never targets."""
    vocab_size: int
    """Random tokens are below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(Objective):
    """Direct preference optimization."""

    section = "dpo"
    ranges: ClassVar = {"beta": ABOVE_ZERO}
    has_pairs = True
    scores_tokens = True

    beta: float = 0.1
    """How much the model is held to its reference; lower values allow more change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPO(Objective):
    """Odds-ratio preference optimization."""

    section = "orpo"
    ranges: ClassVar = {"beta": AT_LEAST_ZERO}
    has_pairs = True
    scores_tokens = True

    beta: float = 0.1
    """Weight of the odds ratio beside the chosen text's loss (λ in the paper)."""
    nll_of_prompts: bool = True
    """Whether that loss is also of the prompt's tokens, as in TRL and the authors' code, or of the
    answer's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPO(Objective):
    """Simple preference optimization."""

    section = "simpo"
    ranges: ClassVar = {
        "beta": ABOVE_ZERO,
        "gamma": AT_LEAST_ZERO,
        "label_smoothing": Range("a number from 0, and below 0.5", lambda value: 0 <= value < 0.5),
    }
    has_pairs = True
    scores_tokens = True

    beta: float = 2.0
    """Scale of the rewards, which are mean log-probabilities of an answer's tokens."""
    gamma: float = 1.0
    """How much larger the reward of the chosen answer is to be."""
    label_smoothing: float = 0.0
    """Share of the pairs that are taken for the wrong way round."""


SEQUENCES = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"
WORDS = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward(Objective):
    """A reward model."""

    section = "reward"
    ranges: ClassVar = {"center_coefficient": AT_LEAST_ZERO}
    has_pairs = True
    has_head = True

    center_coefficient: float = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them near 0."""
    margins: bool = False
    """Whether each record has a `margin`, by which its chosen text's reward is to be larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan(Reward):
    """The section, with the token that is not scored."""

    pad_id: int
    """Token behind texts: the reward is that of the last token before it."""

    @property
    def head(self) -> Head:
        return Head(task="sequence classification", registry=SEQUENCES, size=1, pad_id=self.pad_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classify(Objective):
    """Classification of texts."""

    section = "classify"
    has_head = True
    has_classes = True

    classes: list[str] = field(default_factory=list)
    """Names of the classes in the order of their numbers; none: those of the model, if it is a
    classifier that has the data's, or else of the data: numbers by size, names by alphabet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyTokens(Classify):
    """Classification of the words of texts, by the first token of each."""

    section = "classify_tokens"
    labels_words = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyPlan(Objective):
    """The classes that were found, and the token that is not scored."""

    class_names: tuple[str, ...]
    """Name of each class, by its number."""
    pad_id: int
    """Token behind texts; a causal model's logits are those of the last token before it."""
    classes_of_words: bool = False
    """Whether each word has a class, instead of the whole text."""

    @property
    def head(self) -> Head:
        return Head(
            task="token classification" if self.classes_of_words else "sequence classification",
            registry=WORDS if self.classes_of_words else SEQUENCES,
            size=len(self.class_names),
            pad_id=self.pad_id,
            labels=self.class_names,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(Objective):
    """Knowledge distillation."""

    section = "distill"
    ranges: ClassVar = {"top_k": at_least(1), "alpha": SHARE, "temperature": ABOVE_ZERO}

    teacher: str | None = None
    """A Hugging Face directory of a causal model with the vocabulary of the one that trains."""
    top_k: int = 64
    """Most probable tokens of each target whose probabilities are kept; the others have one
    together."""
    alpha: float = 0.5
    """Weight of the teacher in the loss; that of the labels is the rest to 1."""
    temperature: float = 1.0
    """Divides the logits of both models in the teacher's part of the loss."""

    @property
    def row_size(self) -> int:
        """Numbers of int32 that are kept of a target: tokens, and the bits of probabilities."""
        return 2 * self.top_k + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillPlan(Distill):
    """The section, with a teacher."""

    teacher: str
    """A Hugging Face model directory, by its absolute path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KTO(Objective):
    """Kahneman-Tversky optimization."""

    section = "kto"
    ranges: ClassVar = {
        "beta": ABOVE_ZERO,
        "desirable_weight": ABOVE_ZERO,
        "undesirable_weight": ABOVE_ZERO,
    }
    has_rated_answers = True
    scores_tokens = True
    passes_before = 1

    beta: float = 0.1
    """How much the model is held to its reference; lower values allow more change."""
    desirable_weight: float = 1.0
    """Weight of the loss of good answers."""
    undesirable_weight: float = 1.0
    """Weight of the loss of bad answers."""


Pooling = Literal["mean", "last", "cls"]
"""The vector of a text: the mean of its tokens' hidden states, or that of its last or first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Objective):
    """Embeddings of texts, by contrast with the other texts of the global batch."""

    section = "embed"
    ranges: ClassVar = {"scale": ABOVE_ZERO}
    relates_texts = True
    passes_before = 1

    pooling: Pooling | Literal["auto"] = "auto"
    """What makes a vector of a text's hidden states: their mean, the last token's (last) or the
    first one's (cls); auto: as the directory's sentence-transformers files say."""
    scale: float = 20.0
    """Factor of the cosine similarities, which are then logits."""
    negatives: bool = False
    """Whether each record has a `negative`, a text that is not to be found either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedPlan(Embed):
    """The section, with its pooling."""

    pooling: Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class RelatedPlan:
    """The texts of a sample, and what stands around their tokens."""

    columns: tuple[str, ...]
    """Columns of records, each of which is a row of a sample."""
    pad_id: int
    end_ids: tuple[int, ...]
    """Tokens that the tokenizer puts after a text; a text that is cut keeps them."""


ObjectivePlan = DPO | KTO | ORPO | SimPO | RewardPlan | ClassifyPlan | DistillPlan | EmbedPlan
"""An objective whose loss colotrain computes; each has other keys."""
OBJECTIVES: dict[str, type[Objective]] = {
    "dpo": DPO,
    "masked": Masking,
    "distill": Distill,
    "kto": KTO,
    "embed": Embed,
    "orpo": ORPO,
    "simpo": SimPO,
    "reward": Reward,
    "classify": Classify,
    "classify_tokens": ClassifyTokens,
}
PAIRS = tuple(name for name, objective in OBJECTIVES.items() if objective.has_pairs)
"""The objectives whose samples are preference pairs."""
RANGES = {
    f"train.{objective.section}.{setting}": known
    for objective in OBJECTIVES.values()
    for setting, known in objective.ranges.items()
}
"""Key → the numbers that it may have."""


def objective_of(name: str | None) -> type[Objective]:
    return Objective if name is None else OBJECTIVES[name]
