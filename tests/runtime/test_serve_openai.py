"""OpenAI's own client against the server: every answer is what the model says alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from forerun.runtime.chat import encode_prompt  # noqa: E402
from forerun.runtime.model import Model, load  # noqa: E402
from forerun.runtime.sampling import SamplingParams  # noqa: E402

NAME = "tiny"
CHAT: Any = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "abab abab"},
    {"role": "assistant", "content": "cdcd"},
    {"role": "user", "content": "IJKLMNOPQRIJKLMNOPQR"},
]


@pytest.fixture(scope="module")
def alone(chat_bundle: Path) -> Model:
    """The reference: one request at a time, without speculation."""
    return load(chat_bundle, threads=1)


@pytest.fixture(scope="module")
def server(chat_bundle: Path, serving: Any) -> Iterator[Any]:
    with serving.running(serving.make_service(load(chat_bundle, threads=1, rows=3))) as found:
        yield found


def raw(model: Model, text: str) -> list[int]:
    """A text as this target's raw prompt: <s>, and a token a byte."""
    ids: list[int] = model.bundle.tokenizer.encode(text).ids
    return [model.bundle.tokenizer.token_to_id("<s>"), *ids]


def plain_text(model: Model, ids: list[int], new: int, params: SamplingParams, **more: Any) -> Any:
    return model.stream_ids(ids, new, params, **more).completion


def test_a_chat_is_answered_whole(server: Any, alone: Model) -> None:
    reply = server.client().chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=40, temperature=0
    )
    expected = alone.generate(CHAT, 40, plain=True)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, "length")
    assert choice.message.role == "assistant" and reply.object == "chat.completion"
    assert reply.usage is not None
    prompt = len(encode_prompt(alone.bundle, CHAT))
    counts = (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens)
    assert counts == (prompt, 40, prompt + 40)
    speculative = alone.generate(CHAT, 40).stats
    said = reply.usage.model_extra["speculation"]  # type: ignore[index]
    assert said["steps"] == speculative.steps < 39
    assert said["tau"] == pytest.approx(speculative.tau, abs=1e-4)
    assert said["accepted"] == sum(n * c for n, c in enumerate(speculative.committed))
    assert reply._request_id


def test_a_chat_is_streamed(server: Any, alone: Model) -> None:
    stream = server.client().chat.completions.create(
        model=NAME,
        messages=CHAT,
        max_completion_tokens=60,
        temperature=0.9,
        top_p=0.95,
        seed=-3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 30},
    )
    chunks = list(stream)
    seed = -3 % (1 << 64)
    expected = alone.generate(CHAT, 60, SamplingParams(0.9, 30, 0.95, seed), plain=True)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes[-1] == expected.finish_reason and not any(finishes[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1 and len(deltas) > 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["N", ["QR", "zz"], ["M", "L", "K", "Q"]])
def test_stop_strings_end_the_text(server: Any, alone: Model, stop: Any, stream: bool) -> None:
    texts = ["IJKLMNOPQR" * 2, "hello"]
    for text in texts:
        reply = server.client().completions.create(
            model=NAME, prompt=text, max_tokens=30, temperature=0, stop=stop, stream=stream
        )
        stops = [stop] if isinstance(stop, str) else stop
        expected = plain_text(alone, raw(alone, text), 30, SamplingParams(), stop=stops)
        if stream:
            chunks = list(reply)
            found = "".join(chunk.choices[0].text for chunk in chunks)
            assert (found, chunks[-1].choices[0].finish_reason) == (
                expected.text,
                expected.finish_reason,
            )
        else:
            assert reply.choices[0].text == expected.text
            assert reply.choices[0].finish_reason == expected.finish_reason
            assert reply.usage.completion_tokens == len(expected.token_ids)


def test_several_prompts_and_answers(server: Any, alone: Model) -> None:
    """More of them than there are rows; each answer to one prompt has a seed of its own."""
    prompts = ["hello", "ab" * 20]
    reply = server.client().completions.create(
        model=NAME, prompt=prompts, n=3, seed=7, temperature=1, max_tokens=12
    )
    assert [choice.index for choice in reply.choices] == [*range(6)]
    for choice in reply.choices:
        prompt, answer = divmod(choice.index, 3)
        params = SamplingParams(1.0, seed=7 + answer)
        expected = plain_text(alone, raw(alone, prompts[prompt]), 12, params)
        assert choice.text == expected.text
    assert len({choice.text for choice in reply.choices}) == 6
    ids = raw(alone, "hello")
    for prompt in (ids, [ids]):
        again = server.client().completions.create(
            model=NAME, prompt=prompt, max_tokens=12, temperature=0
        )
        assert again.choices[0].text == plain_text(alone, ids, 12, SamplingParams()).text


def test_an_answer_without_a_seed_differs_each_time(server: Any) -> None:
    texts = {
        server.client()
        .completions.create(model=NAME, prompt="hello", max_tokens=20)
        .choices[0]
        .text
        for _ in range(3)
    }
    assert len(texts) == 3


def test_a_small_temperature_and_top_p_zero_are_greedy(server: Any, alone: Model) -> None:
    expected = plain_text(alone, raw(alone, "hello"), 20, SamplingParams()).text
    for more in ({"temperature": 1e-30}, {"top_p": 0}, {"temperature": 2e-5, "seed": 3}):
        reply = server.client().completions.create(
            model=NAME, prompt="hello", max_tokens=20, **more
        )
        assert reply.choices[0].text == expected


def test_models(server: Any) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "forerun"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=CHAT)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_the_context_ends_an_answer_and_a_longer_prompt_is_refused(
    server: Any, alone: Model
) -> None:
    context = alone.engine.context
    ids = [5] * (context - 10)
    reply = server.client().completions.create(
        model=NAME, prompt=ids, max_tokens=10**12, temperature=0
    )
    expected = plain_text(alone, ids, 100, SamplingParams())
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (expected.text, "length")
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model=NAME, prompt=[5] * (context + 1))
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


def mixed(number: int) -> dict[str, Any]:
    """A request of some kind, always the same for a number."""
    draw = random.Random(number)
    asked: dict[str, Any] = {
        "prompt": draw.choice(["hello", "IJKLMNOPQR" * 3, "ab" * 60, "naïve café — 世界", "x"]),
        "max_tokens": draw.choice([1, 3, 17, 60, 90]),
        "temperature": draw.choice([0, 0, 0.7, 1.3]),
        "seed": number,
        "stream": draw.random() < 0.5,
    }
    if draw.random() < 0.3:
        asked["stop"] = ["QR", "ab"]
    return asked


def test_clients_side_by_side_are_answered_as_alone(server: Any, alone: Model) -> None:
    """8 at a time on 3 rows; some hang up in the middle of their answer, some are refused."""
    client = server.client()

    def ask(number: int) -> str | None:
        asked = mixed(number)
        if number % 9 == 4:
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model=NAME, **{**asked, "temperature": 9})
            return None
        reply = client.completions.create(model=NAME, **asked)
        if not asked["stream"]:
            return str(reply.choices[0].text)
        if number % 5 == 3:
            next(iter(reply))
            reply.close()
            return None
        return "".join(chunk.choices[0].text for chunk in reply)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(64)))
    compared = 0
    for number, text in enumerate(found):
        if text is None:
            continue
        asked = mixed(number)
        params = SamplingParams()
        if asked["temperature"]:
            params = SamplingParams(asked["temperature"], seed=number)
        ids, stop = raw(alone, asked["prompt"]), asked.get("stop", ())
        expected = plain_text(alone, ids, asked["max_tokens"], params, stop=stop)
        assert text == expected.text
        compared += 1
    assert compared > 40 and server.service.scheduler.idle
