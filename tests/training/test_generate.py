"""Batched decoding against the same target decoded one token and one prompt at a time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.models.ops import scatter_in_place  # noqa: E402
from forerun.models.target import Rows, Target  # noqa: E402
from forerun.runtime.sampling import uniforms  # noqa: E402
from forerun.training.generate import (  # noqa: E402
    GenerateConfig,
    Request,
    choose,
    generate,
)
from forerun.training.read import common_prefix  # noqa: E402

STOP = 257
TINY = tuple[Any, dict[str, Any]]


def alone(target: Target, request: Request, limit: int, stop: int) -> tuple[list[int], Any]:
    """A plain loop: every step reads the whole sequence again, without a cache of before."""
    tokens, answer, states = list(request.prompt), [], []
    draws = uniforms(request.seed, limit).tolist()
    while len(answer) < limit and (not answer or answer[-1] != stop):
        count = len(tokens)
        positions = torch.arange(count)[None]
        pending = target.no_pending(1)
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None]
        rows = Rows(positions, torch.zeros(1, dtype=torch.int64), pending, mask)
        caches = target.empty_caches(1, count)
        hidden = target(torch.tensor([tokens]), caches, rows, scatter_in_place).hidden
        logits = target.head(hidden[0, -1])
        if request.temperature:
            cdf = (logits / request.temperature).softmax(-1).cumsum(-1)
            token = int((cdf <= draws[len(answer)] * cdf[-1]).sum())
        else:
            token = int(logits.argmax())
        tokens.append(token)
        answer.append(token)
        states.append(hidden[0, -1])
    return answer, torch.stack(states)


def requests(temperatures: tuple[float, ...], count: int = 11) -> list[Request]:
    draw = torch.Generator().manual_seed(3)
    shared = torch.randint(0, 256, (4,), generator=draw).tolist()
    found = []
    for index in range(count):
        length = int(torch.randint(1, 14, (1,), generator=draw))
        own = torch.randint(0, 256, (length,), generator=draw).tolist()
        prompt = tuple(shared + own if index % 3 else own)
        found.append(Request(index, prompt, temperatures[index % len(temperatures)], 100 + index))
    return found


@pytest.mark.parametrize("temperatures", [(0.0,), (0.9,), (0.0, 0.7)])
@pytest.mark.parametrize(("batch", "refill"), [(1, 1), (4, 2), (64, 8)])
def test_batched_equals_alone(
    tiny_target: TINY, temperatures: tuple[float, ...], batch: int, refill: int
) -> None:
    target = Target(*tiny_target, 64).eval()
    asked = requests(temperatures)
    # A token that does occur ends some answers early, so rows are freed at different times.
    stop = alone(target, asked[0], 20, STOP)[0][5]
    config = GenerateConfig((stop,), 20, batch, refill)
    answers = {answer.request.index: answer for answer in generate(target, asked, config)}
    assert sorted(answers) == list(range(len(asked)))
    for request in asked:
        tokens, states = alone(target, request, 20, stop)
        assert answers[request.index].tokens == tokens
        torch.testing.assert_close(answers[request.index].states, states, atol=1e-4, rtol=1e-4)
    assert len({len(answer.tokens) for answer in answers.values()}) > 1


def test_one_token_answers(tiny_target: TINY) -> None:
    target = Target(*tiny_target, 64).eval()
    answers = list(generate(target, requests((0.0,)), GenerateConfig((STOP,), 1, 3, 2)))
    assert [len(answer.tokens) for answer in answers] == [1] * 11


def test_no_requests(tiny_target: TINY) -> None:
    target = Target(*tiny_target, 64).eval()
    assert list(generate(target, [], GenerateConfig((STOP,), 4))) == []


def test_low_precision_ties_are_decided_in_float32() -> None:
    hidden = torch.ones(1, 4, dtype=torch.bfloat16)
    weight = torch.full((300, 4), 64.0, dtype=torch.bfloat16)
    weight[7, 0] = 64.5  # lost when the sum of 256.5 is rounded to bfloat16
    head = torch.nn.Linear(4, 300, bias=False)
    head.weight = torch.nn.Parameter(weight)
    tied = type("Tied", (torch.nn.Module,), {"forward": lambda self, x: x @ weight.T})()
    tied.embed = head
    logits = tied(hidden)
    assert int((logits == logits.max()).sum()) == 300
    best = logits.topk(8, dim=-1).indices[0].tolist()
    chosen = int(choose(tied, hidden, logits, torch.zeros(1), torch.zeros(1)))
    assert chosen == (7 if 7 in best else chosen)


def test_common_prefix() -> None:
    assert common_prefix([(1, 2, 3), (1, 2, 4), (1, 2)]) == 2
    assert common_prefix([(5,), (6,)]) == 0
    assert common_prefix([(5, 6)]) == 2
