"""A tiny checkpoint to synthesise with and to train for."""

from __future__ import annotations

from dataclasses import replace
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


@pytest.fixture(scope="session")
def deep_checkpoint(tiny_checkpoint: Any) -> Any:
    """The tiny target with six layers, so that EAGLE-3 finds three to read."""
    config, weights = tiny_checkpoint.config, dict(tiny_checkpoint.weights)
    for name, weight in tiny_checkpoint.weights.items():
        for layer in range(2, 6):
            if name.startswith(f"model.layers.{layer % 2}."):
                rest = name.split(".", 3)[3]
                weights[f"model.layers.{layer}.{rest}"] = weight * 0.5
    return replace(tiny_checkpoint, config=replace(config, num_layers=6), weights=weights)
