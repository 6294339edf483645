"""What a measurement tells of single prompts: which gained least, and answers token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from forerun.runtime.model import Completion
from forerun.runtime.prompts import Prompt
from forerun.runtime.text import Detokenizer
from forerun.runtime.tree import Tree

if TYPE_CHECKING:
    from forerun.runtime.bench import Pair

WORST = 8
"""Prompts that gained least, as many as are listed."""
PROMPT_LENGTH = 400
"""Characters of a prompt that are kept."""


def singled_out(pairs: Sequence[Pair], tokenizer: Tokenizer, answers: int) -> dict[str, Any]:
    """The prompts that gained least as `worst`, worst first; some whole answers as `answers`.

    Of those there are `answers`, the ones that gained most before the ones that gained least; 0
    leaves the key out. A prompt that either way ended before its first step gained nothing that
    could be measured, and is in neither.
    """
    ranked = sorted((pair for pair in pairs if pair.speedup), key=lambda pair: pair.speedup)
    worst = [{**_told(pair), "tokens": len(pair.speculative.token_ids)} for pair in ranked[:WORST]]
    if not answers:
        return {"worst": worst}
    least = ranked[: answers // 2]
    most = ranked[len(least) :][len(least) - answers :]
    shown = [
        {**_told(pair), "tokens": shown_tokens(pair.speculative, tokenizer)}
        for pair in [*reversed(most), *least]
    ]
    return {"worst": worst, "answers": shown}


def shown_tokens(completion: Completion, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """The answer's tokens, each with its text and where it came from.

    "drafted" is an accepted draft token; "corrected" the target's own at the end of a step, which
    corrects the draft or goes on from it; "plain" one that nothing was drafted for: the prefill's.
    A token that only begins a character has no text; the one that completes it has all of it.
    """
    detokenizer = Detokenizer(tokenizer)
    shown: list[dict[str, str]] = []
    for number, block in enumerate(completion.blocks):
        for place, token in enumerate(block.tokens):
            own = "corrected" if number else "plain"
            state = "drafted" if place < block.drafted else own
            shown.append({"text": detokenizer.push([token]), "state": state})
    if shown:
        shown[-1]["text"] += detokenizer.flush()
    return shown


def shown_tree(tree: Tree | None, by_depth: Sequence[float]) -> dict[str, Any]:
    """A static draft tree as `tree`, nothing for one that is grown each step or has only its root.

    A chain's node is accepted wherever a step got that deep, so its `accepted` are known. Which of
    several siblings was accepted is not: without `accepted` the depths alone are.
    """
    if tree is None or tree.nodes == 1:
        return {}
    parents = {"parents": list(tree.parents)}
    if tree.depth < tree.nodes - 1:
        return {"tree": parents}
    accepted = [1.0, *by_depth, *[0.0] * tree.depth][: tree.nodes]
    return {"tree": {**parents, "accepted": accepted}}


def words_of(prompt: Prompt) -> str:
    """The prompt's text, or what its last message says."""
    content = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _told(pair: Pair) -> dict[str, Any]:
    text = pair.prompt
    return {
        "prompt": text if len(text) <= PROMPT_LENGTH else text[:PROMPT_LENGTH] + "…",
        "category": pair.category,
        "speedup": pair.speedup,
        "tau": pair.speculative.stats.tau,
    }
