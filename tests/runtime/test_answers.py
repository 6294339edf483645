"""What is told of single prompts, against the steps as the engine itself gives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from forerun.runtime.answers import (
    PROMPT_LENGTH,
    WORST,
    shown_tokens,
    shown_tree,
    singled_out,
    words_of,
)
from forerun.runtime.bench import Pair
from forerun.runtime.engine import Request
from forerun.runtime.loop import Block, Stats
from forerun.runtime.model import Completion, load
from forerun.runtime.prompts import Prompt
from forerun.runtime.tree import Tree

NEW = 24


@pytest.mark.parametrize("text", ["IJKLMNOPQRIJKLMNOPQR", "hello", "abab"])
def test_states_are_those_of_the_engines_steps(tiny_bundle: Path, text: str) -> None:
    model = load(tiny_bundle, threads=1)
    ids = [*text.encode()]
    completion = model.stream_ids(ids, NEW, nodes=8).completion
    engine = load(tiny_bundle, threads=1).engine
    expected = ["plain"] * len(engine.prefill(Request(ids, len(ids) + NEW + 8), 8))
    tokens = [completion.token_ids[0]]
    while len(expected) < NEW:
        committed = engine.step(8)[0]
        expected += ["drafted"] * (len(committed) - 1) + ["corrected"]
        tokens += committed
    shown = shown_tokens(completion, model.bundle.tokenizer)
    assert [token["state"] for token in shown] == expected[:NEW]
    assert tuple(tokens[:NEW]) == completion.token_ids
    assert "".join(token["text"] for token in shown) == completion.text
    if text.startswith("IJKL"):  # prompt lookup is always right here
        assert expected.count("drafted") > NEW // 2


def test_a_character_of_several_tokens_stands_with_the_last(tokenizer: Tokenizer) -> None:
    text = "hello é \U0001f600!"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    blocks = (Block((ids[0],), None), Block(tuple(ids[1:]), "length", len(ids) - 2))
    completion = Completion("", tuple(ids), "length", Stats(), blocks)
    shown = shown_tokens(completion, tokenizer)
    assert "".join(token["text"] for token in shown) == tokenizer.decode(ids)
    states = [token["state"] for token in shown]
    assert states == ["plain", *["drafted"] * (len(ids) - 2), "corrected"]
    assert shown_tokens(replace(completion, blocks=()), tokenizer) == []


def pair(seconds: float, prompt: str = "why?", category: str | None = None) -> Pair:
    """A prompt that took a second plainly, and `seconds` with speculation."""
    plain = Completion("", (65, 66, 67), "length", Stats(0.1, 1.0, 0.5, 2, (2,)))
    stats = Stats(0.1, seconds, seconds / 2, 2, (0, 1))
    blocks = (Block((65,), None), Block((66, 67), "length", 1))
    return Pair(category, plain, Completion("", (65, 66, 67), "length", stats, blocks), prompt)


def test_the_slowest_and_the_fastest_are_singled_out(tiny_bundle: Path) -> None:
    tokenizer = load(tiny_bundle, threads=1).bundle.tokenizer
    pairs = [pair(1 / speedup, f"prompt {speedup}") for speedup in (3, 0.5, 2, 4, 1)]
    found = singled_out(pairs, tokenizer, 3)
    assert [item["prompt"] for item in found["answers"]] == ["prompt 4", "prompt 3", "prompt 0.5"]
    assert [item["speedup"] for item in found["worst"]] == pytest.approx([0.5, 1, 2, 3, 4])
    assert found["worst"][0] == {
        "prompt": "prompt 0.5",
        "category": None,
        "speedup": 0.5,
        "tau": 2.0,
        "tokens": 3,
    }
    states = [token["state"] for token in found["answers"][0]["tokens"]]
    assert states == ["plain", "drafted", "corrected"]
    assert "answers" not in singled_out(pairs, tokenizer, 0)
    assert len(singled_out(pairs * 3, tokenizer, 0)["worst"]) == WORST


def test_few_prompts_are_each_shown_once(tiny_bundle: Path) -> None:
    tokenizer = load(tiny_bundle, threads=1).bundle.tokenizer
    for count in range(4):
        pairs = [pair(1 + number, str(number)) for number in range(count)]
        shown = singled_out(pairs, tokenizer, 4)["answers"]
        assert sorted(item["prompt"] for item in shown) == [str(n) for n in range(count)]


def test_what_has_no_speedup_is_left_out_and_a_long_prompt_cut(tiny_bundle: Path) -> None:
    tokenizer = load(tiny_bundle, threads=1).bundle.tokenizer
    nothing = Completion("", (1,), "stop", Stats())
    found = singled_out([Pair(None, nothing, nothing, "x"), pair(1, "y" * 999)], tokenizer, 2)
    assert [item["prompt"] for item in found["worst"]] == ["y" * PROMPT_LENGTH + "…"]


def test_trees() -> None:
    assert shown_tree(None, [0.5]) == shown_tree(Tree.chain(1), []) == {}
    chain = shown_tree(Tree.chain(4), [0.5, 0.25])
    assert chain == {"tree": {"parents": [-1, 0, 1, 2], "accepted": [1.0, 0.5, 0.25, 0.0]}}
    branching = Tree((-1, 0, 0), (0, 1, 2))
    assert shown_tree(branching, [0.5]) == {"tree": {"parents": [-1, 0, 0]}}


def test_the_words_of_a_prompt() -> None:
    chat = ({"role": "system", "content": "short"}, {"role": "user", "content": "why?"})
    assert words_of(Prompt(None, "plain text", None)) == "plain text"
    assert words_of(Prompt(chat, None, None)) == "why?"
    parts = [{"type": "text", "text": "été"}]
    assert words_of(Prompt(({"role": "user", "content": parts},), None, None)).count("été") == 1
