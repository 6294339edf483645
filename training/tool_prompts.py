"""Function-calling prompts from the pip package bfcl-eval, with the held-out categories kept apart.

`python -m forerun.training.tool_prompts --split train|held-out -o FILE.jsonl` writes a prompt file.
A small target ignores a schema that it only reads about, so a prompt shows solved examples first.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from forerun.errors import MissingDependencyError
from forerun.training.calls import Call
from forerun.training.chat_prompts import WORDS
from forerun.training.filters import Excluded, normalised
from forerun.training.tool_invented import invent
from forerun.training.tool_words import EXAMPLES, QUESTIONS

HELD_OUT = ("live_simple", "multiple")
TRAIN = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "parallel",
    "parallel_multiple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_relevance",
    "live_irrelevance",
    "irrelevance",
)
MAX_FUNCTIONS = 4
MAX_QUESTION = 700
"""Characters; training skips longer questions."""
SHOTS = 3
SETS = 8
"""Different choices of solved examples: few, so that prompts share their beginning."""


@dataclass(frozen=True)
class Split:
    """Held-out calls, the training calls left after the filter, and how many it dropped."""

    held_out: tuple[Call, ...]
    train: tuple[Call, ...]
    counts: dict[str, int]


def split_calls(folder: Path | None = None) -> Split:
    """Reads the package's data and drops from training whatever resembles the held-out calls.

    A training call goes where its normalised question or the name of any of its functions occurs
    in a held-out category. Raises MissingDependencyError where bfcl-eval is not installed.
    """
    folder = bfcl_folder() if folder is None else folder
    held_out = tuple(call for name in HELD_OUT for call in read_calls(folder, name))
    excluded = Excluded(
        frozenset(normalised(call.question) for call in held_out),
        frozenset(name for call in held_out for name in call.names),
    )
    counts = {"held_out": len(held_out), "same_question": 0, "same_function": 0, "repeated": 0}
    train: dict[str, Call] = {}
    for category in TRAIN:
        for call in read_calls(folder, category):
            key = normalised(call.question)
            reason = excluded.why((key,), call.names)
            if reason is not None:
                counts[reason] += 1
            elif key in train:
                counts["repeated"] += 1
            else:
                train[key] = call
    counts["train"] = len(train)
    return Split(held_out, tuple(train.values()), counts)


def bfcl_folder() -> Path:
    """The package's data folder, found without importing it."""
    spec = importlib.util.find_spec("bfcl_eval")
    for location in spec.submodule_search_locations or () if spec else ():
        return Path(location) / "data"
    raise MissingDependencyError("bfcl-eval", "train", "function-calling prompts")


def read_calls(folder: Path, category: str) -> Iterator[Call]:
    """The calls of one category; of a conversation the user's part of the first turn."""
    with (folder / f"BFCL_v4_{category}.json").open(encoding="utf-8") as stream:
        for line in stream:
            data = json.loads(line)
            turn = data["question"][0]
            said = [message["content"] for message in turn if message["role"] == "user"]
            functions = tuple(_function(function) for function in data["function"])
            if said and functions:
                yield Call(category, "\n".join(said).strip(), functions)


def _function(data: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    return data["name"], tuple(data["parameters"].get("properties", {}))


def own_calls(count: int, seed: int, forbidden: Iterable[str]) -> Iterator[Call]:
    """`count` further calls from our own functions and words, none of a `forbidden` name."""
    draw = random.Random(seed)
    names = set(forbidden)
    templates = [
        (signature, question)
        for signature, questions in QUESTIONS.items()
        for question in questions
        if signature.partition("(")[0] not in names
    ]
    seen: set[str] = set()
    while len(seen) < count:
        signature, template = draw.choice(templates)
        values: dict[str, str | int] = {kind: draw.choice(words) for kind, words in WORDS.items()}
        values |= {"a": draw.randint(2, 90), "b": draw.randint(2, 30), "c": draw.randint(100, 999)}
        question = template.format(**values)
        if question not in seen:
            seen.add(question)
            yield Call("own", question, (parse_signature(signature),))


def parse_signature(signature: str) -> tuple[str, tuple[str, ...]]:
    """`"f(a, b)"` -> `("f", ("a", "b"))`."""
    name, _, arguments = signature.rstrip(")").partition("(")
    return name, tuple(part.strip() for part in arguments.split(",") if part.strip())


def messages(call: Call, shots: int) -> list[dict[str, str]]:
    """Solved examples of set `shots`, then `call` itself, as chat turns."""
    chosen = random.Random(shots).sample(EXAMPLES, SHOTS)
    turns = []
    for signature, question, arguments in chosen:
        name = signature.partition("(")[0]
        answer = json.dumps({"name": name, "arguments": arguments})
        turns.append({"role": "user", "content": f"Function: {signature}\n{question}"})
        turns.append({"role": "assistant", "content": answer})
    lines = [f"Function: {name}({', '.join(arguments)})" for name, arguments in call.functions]
    return [*turns, {"role": "user", "content": "\n".join([*lines, call.question])}]


def train_prompts(
    split: Split, rounds: int, own: int, invented: int = 0, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Every training call and `own` of our own, `rounds` times behind different examples; then
    `invented` ones once.

    Prompts that begin with the same examples lie side by side, which synthesis profits from.
    """
    forbidden = frozenset().union(*(call.names for call in split.held_out))
    used = {example[0].partition("(")[0] for example in EXAMPLES}
    assert not used & forbidden, f"examples use held-out functions: {used & forbidden}"
    calls = [
        call
        for call in split.train
        if len(call.question) <= MAX_QUESTION and len(call.functions) <= MAX_FUNCTIONS
    ]
    calls += own_calls(own, seed, forbidden)
    random.Random(seed).shuffle(calls)
    for turn in range(rounds):
        for shots in range(SETS):
            for number, call in enumerate(calls):
                if (number + turn) % SETS == shots:
                    yield {"messages": messages(call, shots), "category": f"tool/{call.category}"}
    others = [call for call in invent(invented, seed) if not forbidden & call.names]
    for shots in range(SETS):
        for call in others[shots::SETS]:
            yield {"messages": messages(call, shots), "category": f"tool/{call.category}"}


def held_out_prompts(split: Split) -> Iterator[dict[str, Any]]:
    """The held-out calls in mixed order, each behind one of the example sets."""
    calls: Sequence[Call] = random.Random(0).sample(split.held_out, len(split.held_out))
    for number, call in enumerate(calls):
        turns = messages(call, number % SETS)
        yield {"messages": turns, "category": f"tool/{call.category}"}


@click.command()
@click.option("--split", "part", type=click.Choice(["train", "held-out"]), required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="JSON lines.")
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--own", type=click.IntRange(0), default=1500, show_default=True)
@click.option("--invented", type=click.IntRange(0), default=6000, show_default=True)
def main(part: str, output: Path, rounds: int, own: int, invented: int) -> None:
    """Writes function-calling prompts for `forerun synthesize` or `forerun bench`."""
    split = split_calls()
    if part == "held-out":
        prompts = held_out_prompts(split)
    else:
        prompts = train_prompts(split, rounds, own, invented)
    with output.open("w", encoding="utf-8") as stream:
        for prompt in prompts:
            stream.write(json.dumps(prompt, ensure_ascii=False) + "\n")
    click.echo(", ".join(f"{name} {count}" for name, count in split.counts.items()))


if __name__ == "__main__":
    main()
