"""The prompts that we write ourselves, and the held-out filter of the function-calling ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from forerun.errors import MissingDependencyError
from forerun.runtime.prompts import read_prompts
from forerun.training import chat_prompts, tool_prompts
from forerun.training.tool_invented import NOUNS, VERBS, invent
from forerun.training.tool_prompts import (
    Call,
    Split,
    messages,
    normalised,
    own_calls,
    parse_signature,
)
from forerun.training.tool_words import EXAMPLES, QUESTIONS


def needs_bfcl() -> Path:
    try:
        return tool_prompts.bfcl_folder()
    except MissingDependencyError:
        pytest.skip("bfcl-eval is not installed")


def test_chat_prompts_are_distinct_filled_and_repeatable() -> None:
    made = list(chat_prompts.chat_prompts(1000, 5))
    assert made == list(chat_prompts.chat_prompts(1000, 5))
    assert made != list(chat_prompts.chat_prompts(1000, 6))
    texts = [text for _, text in made]
    assert len(set(texts)) == 1000
    assert not [text for text in texts if "{" in text or "}" in text]
    assert {category for category, _ in made} == set(chat_prompts.TEMPLATES)


def test_chat_prompts_have_nothing_of_the_benchmarks() -> None:
    data = Path(__file__).parents[3] / "shared" / "data"
    if not data.exists():
        pytest.skip("no benchmark prompts here")
    measured = set()
    for file in data.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            said = record.get("turns") or [record.get("prompt") or record["messages"][0]["content"]]
            measured |= {normalised(text) for text in said}
    made = {normalised(text) for _, text in chat_prompts.chat_prompts(5000, 0)}
    assert not made & measured


def test_chat_prompt_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    result = CliRunner().invoke(chat_prompts.main, ["-o", str(path), "--count", "40"])
    assert result.exit_code == 0
    prompts = read_prompts(path)
    assert len(prompts) == 40
    assert prompts[0].category == "chat/writing"


def test_train_and_held_out_do_not_meet(capsys: pytest.CaptureFixture[str]) -> None:
    split = tool_prompts.split_calls(needs_bfcl())
    print(split.counts)
    questions = {normalised(call.question) for call in split.held_out}
    names = {name for call in split.held_out for name in call.names}
    assert len(split.held_out) > 400
    for call in split.train:
        assert normalised(call.question) not in questions
        assert not call.names & names
    for prompt in tool_prompts.train_prompts(split, rounds=1, own=300):
        for message in prompt["messages"]:
            if message["role"] == "user":
                *functions, question = message["content"].split("\n")
                assert normalised(question) not in questions
                for function in functions:
                    assert not function.startswith("Function: ") or (
                        parse_signature(function.removeprefix("Function: "))[0] not in names
                    )
            else:
                assert json.loads(message["content"])["name"] not in names
    assert {call.category for call in split.held_out} == set(tool_prompts.HELD_OUT)


def test_filter_on_made_up_data(tmp_path: Path) -> None:
    def write(category: str, *items: tuple[str, str]) -> None:
        lines = [
            json.dumps(
                {
                    "question": [[{"role": "user", "content": question}]],
                    "function": [{"name": name, "parameters": {"properties": {"x": {}}}}],
                }
            )
            for question, name in items
        ]
        (tmp_path / f"BFCL_v4_{category}.json").write_text("".join(f"{line}\n" for line in lines))

    for category in tool_prompts.TRAIN:
        write(category)
    write("live_simple", ("How old is the sun?", "age"))
    write("multiple", ("Add 2 and 3.", "add"))
    write("simple_python", ("how OLD is the sun", "other"), ("Multiply 2 and 3.", "add"))
    write("parallel", ("Say hello.", "greet"), ("say hello!", "greet2"))
    split = tool_prompts.split_calls(tmp_path)
    assert [call.question for call in split.train] == ["Say hello."]
    assert split.counts == {
        "held_out": 2,
        "same_question": 1,
        "same_function": 1,
        "repeated": 1,
        "train": 1,
    }


def test_solved_examples_fit_their_signatures() -> None:
    for signature, question, arguments in EXAMPLES:
        name, declared = parse_signature(signature)
        assert name and set(arguments) <= set(declared) and question
    assert {parse_signature(signature)[0] for signature in QUESTIONS}.isdisjoint(
        parse_signature(signature)[0] for signature, _, _ in EXAMPLES
    )


def test_messages_end_with_the_call() -> None:
    call = Call("own", "What now?", (("f", ("a", "b")), ("g", ())))
    turns = messages(call, 1)
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 3 + ["user"]
    assert turns[-1]["content"] == "Function: f(a, b)\nFunction: g()\nWhat now?"
    assert turns == messages(call, 1)
    assert turns != messages(call, 2)


def test_own_calls_avoid_forbidden_names() -> None:
    made = list(own_calls(200, 0, ["trip_planner"]))
    assert len({call.question for call in made}) == 200
    assert not [call for call in made if "trip_planner" in call.names]


def test_held_out_prompt_file(tmp_path: Path) -> None:
    needs_bfcl()
    path = tmp_path / "held.jsonl"
    result = CliRunner().invoke(tool_prompts.main, ["--split", "held-out", "-o", str(path)])
    assert result.exit_code == 0 and "train" in result.output
    assert {prompt.category for prompt in read_prompts(path)} == {
        "tool/live_simple",
        "tool/multiple",
    }


def test_invented_calls_are_distinct_spelt_in_many_ways_and_repeatable() -> None:
    made = list(invent(400, 1))
    assert made == list(invent(400, 1))
    assert len({call.question for call in made}) == 400
    assert not [call for call in made if "{" in call.question or "}" in call.question]
    names = [name for call in made for name, _ in call.functions]
    assert len(set(names)) > 300
    assert {"." in name for name in names} == {"_" in name for name in names} == {True, False}
    for call in made:
        for name, arguments in call.functions:
            parsed = parse_signature(f"{name}({', '.join(arguments)})")
            assert parsed == (name, arguments)
            assert len(set(arguments)) == len(arguments) > 0


def test_no_invented_function_is_a_held_out_one() -> None:
    name = next(invent(1, 0)).functions[0][0]
    held_out = Call("multiple", "What?", ((name, ("x",)),))
    prompts = [*tool_prompts.train_prompts(Split((held_out,), (), {}), 1, 0, invented=200)]
    assert 0 < len(prompts) < 200
    assert not [prompt for prompt in prompts if f" {name}(" in prompt["messages"][-1]["content"]]


def test_an_invented_question_offers_the_function_that_it_asks_for() -> None:
    """Whatever its spelling, and once."""
    for call in invent(2000, 0):
        asked = call.question.lower()
        letters = [re.sub("[^a-z]", "", name.lower()) for name, _ in call.functions]
        assert any(
            verb in name and noun in name
            for name in letters
            for verb in VERBS
            if f"{verb} " in asked
            for noun in (noun.replace(" ", "") for noun in NOUNS if noun in asked)
        )
        assert len({name for name, _ in call.functions}) == len(call.functions)
