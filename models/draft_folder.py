"""A draft model from a checkpoint: any that could be a target, with the target's own vocabulary."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint, load_checkpoint
from forerun.models.draft_model import DraftModel


def load_draft_model(path: Path, target: Checkpoint, capacity: int) -> DraftModel:
    """The language model in the folder or .gguf file `path`, as a drafter for `target`.

    Raises ForerunError where it can't be read, or its vocabulary is not the target's.
    """
    draft = load_checkpoint(path)
    check_vocabulary(draft, target, path)
    return DraftModel(draft.config, draft.weights, capacity)


def check_vocabulary(draft: Checkpoint, target: Checkpoint, path: Path) -> None:
    """The same tokens under the same ids: anything else would draft other words than it reads."""
    sizes = draft.config.vocab_size, target.config.vocab_size
    own, wanted = (
        {token: text for text, token in checkpoint.tokenizer.get_vocab().items()}
        for checkpoint in (draft, target)
    )
    for token in sorted(own.keys() | wanted.keys()):
        if own.get(token) != wanted.get(token):
            raise ForerunError(
                f"{path}: its vocabulary is not the target's: token {token} is "
                f"{own.get(token)!r}, the target's is {wanted.get(token)!r}: a draft model must "
                "share the target's tokenizer"
            )
    if sizes[0] != sizes[1]:
        raise ForerunError(
            f"{path}: it has logits for {sizes[0]} tokens, the target for {sizes[1]}, from id "
            f"{min(sizes)} on they differ: a draft model must share the target's vocabulary"
        )
