"""What drafters that learn from whole texts begin with, and how their progress is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafter import Drafter
from forerun.training.data import commonest, frequencies
from forerun.training.evaluate import columns_of
from forerun.training.texts import Text
from forerun.training.unrolled import Columns

Say = Callable[[str], None]


@dataclass(frozen=True)
class Lesson:
    """The texts to learn from, and the tokens that the loss runs over."""

    texts: list[Text]
    """None held out, each with an answer of two tokens or more."""
    frequencies: Tensor  # [V] int64, in all texts that are not held out
    ids: Tensor  # [V'] int64: the commonest tokens, ascending
    columns: Tensor  # [V + 1] int64: each token's place among `ids`, or -1
    ends: Columns
    """The target's, the vocabulary layer cut to `ids`."""
    digest: str
    """The target's."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        texts: Sequence[Text],
        draft_vocabulary: int,
        say: Say,
        begun: Drafter | None = None,
    ) -> Lesson:
        """The tokens are those that `begun` drafts, where it is given and drafts not all.

        Raises ForerunError where there is nothing to learn from.
        """
        seen = [text for text in texts if not text.held_out]
        used = [text for text in seen if len(text.states) > 1]
        if not used:
            raise ForerunError(
                "no answer of two tokens or more to train on, held-out ones aside: synthesize more"
            )
        say(f"{sum(len(text.states) for text in used)} answer tokens to train on")
        vocabulary = checkpoint.config.vocab_size
        counts = frequencies(seen, vocabulary)
        known = getattr(begun, "ids", None)
        ids = commonest(counts, draft_vocabulary).sort().values if known is None else known
        ends, columns = Columns.of(checkpoint, ids), columns_of(ids, vocabulary)
        return cls(used, counts, ids, columns, ends, checkpoint.digest)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(text.tokens) for text in self.texts)

    @property
    def facts(self) -> str:
        """Names the target and the data."""
        return f"{self.digest} {len(self.texts)} {sum(len(text.tokens) for text in self.texts)}"


def pack(texts: Sequence[Text], tokens: int) -> list[list[Text]]:
    """Groups of texts of like length, each of at most so many padded tokens (one text at least)."""
    groups: list[list[Text]] = []
    for text in sorted(texts, key=lambda text: (len(text.tokens), len(text.states))):
        if groups and (len(groups[-1]) + 1) * len(text.tokens) <= tokens:
            groups[-1].append(text)
        else:
            groups.append([text])
    return groups


def progress_line(epoch: int, figures: Tensor) -> str:
    """An epoch's line; the first half of `figures` are losses, the second shares, step by step."""
    found, share = figures.chunk(2)
    shown = [" ".join(f"{x:.3f}" for x in part.tolist()) for part in (found, share)]
    return f"epoch {epoch}: loss {shown[0]}; all right up to step 1, 2, ...: {shown[1]}"
