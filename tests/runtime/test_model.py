"""The Python API: texts, stop strings, limits, and one request after another."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import forerun.runtime
from forerun.errors import ForerunError
from forerun.runtime.model import Completion, Model, load
from forerun.runtime.sampling import SamplingParams

PROMPTS = ["hello", "ab" * 20, "naïve café — 世界", ""]
LOOP = "IJKLMNOPQR" * 2
"""The tiny target goes on with this for ever."""
SAMPLED = SamplingParams(1.0, top_k=40, seed=3)


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Model:
    return load(tiny_bundle, threads=1)


@pytest.fixture(scope="module")
def medusa(tiny_medusa_bundle: Path) -> Model:
    return load(tiny_medusa_bundle, threads=1)


def facts(completion: Completion) -> tuple[Any, ...]:
    return completion.text, completion.token_ids, completion.finish_reason


def test_load_is_offered_by_the_package_and_imported_only_then() -> None:
    assert forerun.runtime.load is load
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        forerun.runtime.nothing  # noqa: B018
    script = "import sys, forerun.runtime; assert not {'numpy', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_plain_and_speculative_give_the_same_completion(
    model: Model, medusa: Model, params: SamplingParams
) -> None:
    for prompt in PROMPTS:
        plain = model.generate(prompt, 60, params, plain=True)
        assert plain.stats.tau == 1.0 and 0 < len(plain.token_ids) <= 60
        for other, nodes in ((model, None), (model, 4), (medusa, None), (medusa, 6)):
            assert facts(other.generate(prompt, 60, params, nodes=nodes)) == facts(plain)


def test_the_pieces_of_a_stream_are_the_completion(model: Model) -> None:
    for prompt in PROMPTS:
        stream = model.stream(prompt, 40, SAMPLED)
        pieces = list(stream)
        assert "".join(pieces) == stream.completion.text
        assert all(pieces) and stream.completion.stats.steps > 0
        assert stream.completion.text == model.bundle.tokenizer.decode(stream.completion.token_ids)
        assert facts(stream.completion) == facts(model.generate(prompt, 40, SAMPLED))


def test_asking_for_the_completion_decodes_the_rest(model: Model) -> None:
    whole = model.generate("hello", 40)
    stream = model.stream("hello", 40)
    first = next(stream)
    assert whole.text.startswith(first)
    assert facts(stream.completion) == facts(whole)


def test_a_closed_stream_keeps_what_there_was(model: Model) -> None:
    whole = model.generate("hello", 40, plain=True)
    stream = model.stream("hello", 40, plain=True)
    shown = "".join(itertools.islice(stream, 5))
    stream.close()
    completion = stream.completion
    assert completion.text == shown and completion.finish_reason == "cancelled"
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) < 40
    assert facts(model.generate("hello", 40)) == facts(whole)


def test_a_stream_never_started_is_empty(model: Model) -> None:
    stream = model.stream("hello")
    stream.close()
    assert facts(stream.completion) == ("", (), "cancelled")


def test_a_second_request_sees_nothing_of_the_first(model: Model, tiny_bundle: Path) -> None:
    fresh = load(tiny_bundle, threads=1)
    for prompt in (*PROMPTS, *PROMPTS[::-1]):
        assert facts(model.generate(prompt, 30)) == facts(fresh.generate(prompt, 30))
        fresh = load(tiny_bundle, threads=1)


def test_a_request_begun_in_the_middle_of_another_ends_that_one(model: Model) -> None:
    stream = model.stream("hello", 40, plain=True)
    next(stream)
    model.generate("other", 5)
    with pytest.raises(ForerunError, match="another request began on this model"):
        list(stream)


@pytest.mark.parametrize("plain", [True, False])
def test_a_stop_token_ends_the_text(model: Model, plain: bool) -> None:
    whole = model.generate("ab" * 20, 60, plain=True)
    token = whole.token_ids[20]
    stopping = Model(_with_stops(model, (999 % 260, token)), model.engine)
    completion = stopping.generate("ab" * 20, 60, plain=plain)
    at = whole.token_ids.index(token)
    assert completion.finish_reason == "stop" and completion.token_ids == whole.token_ids[:at]


def _with_stops(model: Model, stops: Sequence[int]) -> Any:
    from dataclasses import replace

    manifest = model.bundle.manifest
    target = replace(manifest.target, stop_ids=tuple(stops))
    return replace(model.bundle, manifest=replace(manifest, target=target))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("stop", ["I", "L", "MNO", "QRIJ", "R", "JKLMNOPQRIJK"])
def test_the_text_ends_before_a_stop_string(model: Model, plain: bool, stop: str) -> None:
    whole = model.generate(LOOP, 60)
    assert whole.text == "IJKLMNOPQR" * 6
    stream = model.stream(LOOP, 60, plain=plain, stop=["never", stop])
    text = "".join(stream)
    at = whole.text.index(stop)
    assert text == whole.text[:at] == stream.completion.text
    assert stream.completion.finish_reason == "stop"
    # The tokens of the stop string are there and none after it, whatever the blocks were.
    assert stream.completion.token_ids == whole.token_ids[: at + len(stop)]


def test_one_stop_string_may_come_alone(model: Model) -> None:
    assert model.generate(LOOP, 30, stop="NO").text == "IJKLM"


def test_a_half_met_stop_string_is_shown_in_the_end(model: Model) -> None:
    assert model.generate(LOOP, 30, stop=["QRx"]).text == "IJKLMNOPQR" * 3


@pytest.mark.parametrize("new", [1, 2, 7])
@pytest.mark.parametrize("plain", [True, False])
def test_max_new_tokens_is_exact(model: Model, new: int, plain: bool) -> None:
    completion = model.generate("ab" * 20, new, plain=plain)
    assert len(completion.token_ids) == new and completion.finish_reason == "length"


@pytest.mark.parametrize("plain", [True, False])
def test_the_context_ends_the_answer(model: Model, plain: bool) -> None:
    completion = model.generate("ab" * 100, 1000, plain=plain)
    used = len("ab" * 100) + 1 + len(completion.token_ids)
    assert used == model.engine.context and completion.finish_reason == "length"


def test_a_prompt_longer_than_the_context(model: Model) -> None:
    with pytest.raises(ForerunError, match=r"the prompt has 1001 tokens; this bundle takes 1 to"):
        model.generate("a" * 1000)


@pytest.mark.parametrize("new", [0, -1])
def test_no_tokens_asked_for(model: Model, new: int) -> None:
    with pytest.raises(ForerunError, match=f"max_new_tokens is {new}"):
        model.stream("hello", new)


def test_an_empty_prompt_without_a_first_token(model: Model) -> None:
    from dataclasses import replace

    manifest = model.bundle.manifest
    target = replace(manifest.target, add_bos=False)
    bundle = replace(model.bundle, manifest=replace(manifest, target=target))
    with pytest.raises(ForerunError, match="the prompt is empty"):
        Model(bundle, model.engine).generate("")


def test_a_tree_that_the_bundle_lacks(model: Model) -> None:
    with pytest.raises(ForerunError, match="no tree of 5 nodes: it has 1, 4, 8"):
        model.generate("hello", nodes=5)
    assert model.generate("hello", 5, nodes=5, plain=True).finish_reason == "length"


def test_an_empty_stop_string(model: Model) -> None:
    with pytest.raises(ForerunError, match="a stop string is empty"):
        model.generate("hello", stop=[""])


def test_messages_need_a_template(model: Model) -> None:
    with pytest.raises(ForerunError, match="no chat template"):
        model.generate([{"role": "user", "content": "hello"}])
