"""A GGUF file's vocabulary and merges -> a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from forerun.errors import ForerunError

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF that stand for themselves in a text."""

_END_TEXTS = frozenset(
    ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>")
)
"""Control tokens that end an answer in every model that has them: a file names only one or two."""


@dataclass(frozen=True)
class GgufVocabulary:
    """A tokenizer and what a GGUF file says about its special tokens."""

    tokenizer: Tokenizer
    bos_token: str | None
    eos_token: str | None
    stop_ids: tuple[int, ...]
    add_bos: bool


@dataclass(frozen=True)
class _Split:
    """How a text is cut into words before the merges."""

    splitters: tuple[pre_tokenizers.PreTokenizer, ...]
    normalizer: normalizers.Normalizer | None = None
    whole_words: bool = False
    """A word that is itself a token stays whole, whatever the merges say."""
    add_bos: bool = False


def _by_regex(digits: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
    """GPT-4's split, with numbers cut as `digits` says."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
    ) + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return (
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


_LLAMA3 = _Split(_by_regex(r"\p{N}{1,3}"), whole_words=True, add_bos=True)
_SPLITS: dict[str, _Split] = {
    "smollm": _Split(
        (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
    ),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Split(_by_regex(r"\p{N}"), normalizer=normalizers.NFC()),
}
"""`tokenizer.ggml.pre` -> the split of the model that it is named after."""


def vocabulary_from_gguf(metadata: Mapping[str, Any], where: str) -> GgufVocabulary:
    """The tokenizer in a GGUF file's `metadata`.

    Raises ForerunError for a tokenizer of an unsupported kind, and for lists that are missing,
    of the wrong type or at odds with one another.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _SPLITS:
        raise ForerunError(
            f"{where} has a tokenizer of kind {kind!r} with the split {pre!r}, supported are "
            f"'gpt2' with {', '.join(_SPLITS)}: use the model's Hugging Face folder"
        )
    split = _SPLITS[pre]
    tokens = _list(metadata, "tokenizer.ggml.tokens", str, where)
    types = _list(metadata, "tokenizer.ggml.token_type", int, where)
    merges = _list(metadata, "tokenizer.ggml.merges", str, where)
    if len(types) != len(tokens):
        raise ForerunError(
            f"{where} has {len(tokens)} tokens but {len(types)} token types: download it again"
        )
    tokenizer = _tokenizer(tokens, merges, split, where)
    for wanted in (_CONTROL, _USER_DEFINED):
        tokenizer.add_tokens(
            [
                AddedToken(text, special=wanted == _CONTROL, normalized=False)
                for text, found in zip(tokens, types, strict=True)
                if found == wanted
            ]
        )

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise ForerunError(
                f"{where} has tokenizer.ggml.{name}_token_id {value!r}, which is not one of its "
                f"{len(tokens)} tokens: download it again"
            )
        return value

    bos, eos = token_id("bos"), token_id("eos")
    named = {eos, token_id("eot"), token_id("eom")} - {None}
    known = {
        index
        for index, (text, found) in enumerate(zip(tokens, types, strict=True))
        if found == _CONTROL and text in _END_TEXTS
    }
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", split.add_bos))
    return GgufVocabulary(
        tokenizer=tokenizer,
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        stop_ids=tuple(sorted(index for index in named | known if index is not None)),
        add_bos=add_bos and bos is not None,
    )


def _tokenizer(tokens: list[str], merges: list[str], split: _Split, where: str) -> Tokenizer:
    # A merge's left part may itself start with a space, so the border is sought from character 1.
    borders = [merge.find(" ", 1) for merge in merges]
    pairs = [
        (merge[:border], merge[border + 1 :]) for merge, border in zip(merges, borders, strict=True)
    ]
    try:
        model = BPE(
            vocab={text: index for index, text in enumerate(tokens)},
            merges=pairs,
            ignore_merges=split.whole_words,
        )
    except Exception as error:  # tokenizers raises bare Exception
        raise ForerunError(
            f"{where} has merges that do not fit its tokens ({error}): download it again"
        ) from None
    tokenizer = Tokenizer(model)
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(split.splitters))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _list(metadata: Mapping[str, Any], key: str, item: type, where: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, item) for entry in value):
        raise ForerunError(
            f"{where} has no list of {item.__name__} under {key!r}: download it again"
        )
    return value
