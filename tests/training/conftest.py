"""A tiny checkpoint to synthesise with and to train for."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_target: tuple[Any, dict[str, Any]]) -> Any:
    """The tiny target with a tokenizer of one token a byte and no chat template."""
    pytest.importorskip("torch")
    from forerun.models.checkpoint import Checkpoint

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    config, weights = tiny_target
    return Checkpoint(
        *("tiny", config, weights, tokenizer, None, "<s>", "</s>", (60, 257), False, "d" * 64)
    )
