"""Which prompts are the same, held out or forbidden."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from forerun.errors import MissingDependencyError
from forerun.runtime.prompts import Prompt
from forerun.training import tool_prompts
from forerun.training.filters import (
    Excluded,
    allowed,
    distinct,
    functions_of,
    is_held_out,
)


def chat(*texts: str, later: tuple[str, ...] = (), tools: tuple[Any, ...] = ()) -> Prompt:
    """A conversation that the user begins."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    return Prompt(messages, None, None, later, tools)


SCHEMA = {"type": "function", "function": {"name": "pay", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("Function: sky.colour(at, day)\nFunction: f()\nWhat now?", {"sky.colour", "f"}),
        ("I like the Function: g(", set()),
        ('You may use <tools>{"name": "send", "parameters": {}}</tools>{', {"send"}),
        ('{"name": "send", "arguments": {"to": {"name": "Ada"}}}', {"send"}),
        ('My JSON is {"name": "Ada", "age": 3}, {broken', set()),
        ([SCHEMA, {"name": "look", "input_schema": {}}], {"pay", "look"}),
        ({"tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]}, {"x"}),
        ("{" * 3000, set()),
        ('{"a":' * 3000, set()),
    ],
)  # fmt: skip
def test_functions_are_found(value: Any, names: set[str]) -> None:
    assert set(functions_of(value)) == names


def test_the_same_conversation_is_asked_once() -> None:
    prompts = [
        chat("Add 2 + 3"),
        chat("  add 2 +\n3 "),
        Prompt(None, "ADD 2 + 3", "maths"),
        chat("Add 2 - 3"),
        chat("Add 2 + 3", later=("And now?",)),
        chat("Add 2 + 3", later=("and  NOW?",)),
        chat("Add 2 + 3", tools=(SCHEMA,)),
        chat("Example", "Answer", "Add 2 + 3"),
    ]
    assert [index for index, _ in distinct(enumerate(prompts))] == [0, 3, 4, 6, 7]


def test_what_others_ask_or_name_is_dropped() -> None:
    shot = ("Function: shown(a)\nShow one.", '{"name": "shown", "arguments": {}}')
    excluded = Excluded.of(
        [
            chat(*shot, "Function: secret(a, b)\nWhat is the secret?"),
            chat("First of two?", later=("Second of two?",)),
            chat("With a schema", tools=(SCHEMA,)),
            Prompt(None, "👍", None),
        ]
    )
    prompts = {
        "same_question": [
            chat("what is the SECRET"),
            chat(*shot, "Function: other(x)\nWhat is the secret?"),
            chat("What is the secret?", "42", "Thank you."),
            chat("Good day.", later=("second of two",)),
            chat(" 👍 "),
        ],
        "same_function": [
            chat("Function: secret(c)\nSomething else?"),
            chat("Function: secret(c)\nExample.", "{}", "Something else?"),
            chat("Hello", '{"name": "pay", "arguments": {}}', "Again."),
            chat("Hello", tools=(SCHEMA,)),
        ],
        None: [
            chat(*shot, "Function: other(x)\nWhat else?"),  # the example is shown, not asked
            chat("Is there a secret?"),
            chat("👎"),
        ],
    }
    for reason, group in prompts.items():
        assert [excluded.why_not(prompt) for prompt in group] == [reason] * len(group)
    dropped = Counter[str]()
    everything = [prompt for group in prompts.values() for prompt in group]
    kept = [prompt for _, prompt in allowed(enumerate(everything), excluded, dropped)]
    assert kept == prompts[None]
    assert dropped == {"same_question": 5, "same_function": 4}


def test_the_held_out_function_calls_exclude_themselves_and_leave_the_others() -> None:
    """The filter of prompt files agrees with the one that made them."""
    try:
        split = tool_prompts.split_calls()
    except MissingDependencyError:
        pytest.skip("bfcl-eval is not installed")

    def prompts(made: Any) -> list[Prompt]:
        return [Prompt(tuple(line["messages"]), None, line["category"]) for line in made]

    held_out = prompts(tool_prompts.held_out_prompts(split))
    excluded = Excluded.of(held_out)
    assert all(excluded.why_not(prompt) for prompt in held_out)
    trained = prompts(tool_prompts.train_prompts(split, rounds=1, own=200))
    assert Counter(map(excluded.why_not, trained)) == {None: len(trained)}


def test_split_looks_at_the_question_alone() -> None:
    for i in range(40):
        bare, shown = chat(f"Question {i}"), chat("2 + 2?", "4", f" question  {i}")
        assert is_held_out(bare) == is_held_out(shown)
        assert is_held_out(bare) == is_held_out(chat(f"Question {i}", later=("More?",)))
