"""The loop on a tiny target: the tokens of plain decoding, cut where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forerun.errors import ForerunError
from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import Block, Stats, cut, decode
from forerun.runtime.sampling import SamplingParams, uniforms

PROMPTS = [[3, 4, 5, 6, 3, 4, 0], [0], list(range(40)), [7, 7, 7, 7], [9, 8, 9, 8, 9, 8, 200]]
PARAMS = [
    SamplingParams(),
    SamplingParams(0.8, seed=1),
    SamplingParams(1.3, top_k=20, top_p=0.9, seed=2),
]

LOOP = [*range(40, 50)] * 3
"""The tiny target goes on with this for ever, so that prompt lookup is always right."""


@pytest.fixture(scope="module")
def ngram(tiny_bundle: Path) -> Any:
    return load_engine(load_bundle(tiny_bundle), threads=1)


@pytest.fixture(scope="module")
def medusa(tiny_medusa_bundle: Path) -> Any:
    return load_engine(load_bundle(tiny_medusa_bundle), threads=1)


def run(
    engine: Any,
    prompt: Sequence[int],
    new: int,
    nodes: int,
    params: SamplingParams = PARAMS[0],
    stop_ids: Sequence[int] = (),
) -> tuple[list[int], str | None, Stats]:
    decoding = decode(engine, Request(prompt, len(prompt) + new, params), nodes, stop_ids)
    blocks = list(decoding)
    assert all(block.finish is None for block in blocks[:-1])
    return [token for block in blocks for token in block.tokens], blocks[-1].finish, decoding.stats


@pytest.fixture(scope="module")
def combined(tiny_combined_bundle: Path) -> Any:
    return load_engine(load_bundle(tiny_combined_bundle), threads=1)


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "warped"])
@pytest.mark.parametrize(
    ("name", "sizes"), [("ngram", (4, 8)), ("medusa", (6, 10)), ("combined", (6, 10))]
)
def test_speculation_changes_no_token(
    request: pytest.FixtureRequest, name: str, sizes: tuple[int, ...], params: SamplingParams
) -> None:
    engine = request.getfixturevalue(name)
    deeper = 0
    for prompt in PROMPTS:
        plain, finish, stats = run(engine, prompt, 60, 1, params)
        assert len(plain) == 60 and finish == "length" and stats.tau == 1.0
        for nodes in sizes:
            tokens, finish, stats = run(engine, prompt, 60, nodes, params)
            assert tokens == plain and finish == "length"
            deeper += sum(stats.committed[1:])
    # Something must have been accepted, or the test shows nothing.
    assert deeper > 0 or name == "medusa"


def test_both_drafters_give_the_same_tokens(ngram: Any, medusa: Any) -> None:
    for params in PARAMS:
        assert (
            run(ngram, PROMPTS[0], 50, 8, params)[0] == run(medusa, PROMPTS[0], 50, 10, params)[0]
        )


@pytest.fixture(scope="module")
def llama(tiny_target: tuple[Any, dict[str, Any]]) -> Any:
    """transformers' own Llama around the tiny weights."""
    transformers = pytest.importorskip("transformers")
    config, weights = tiny_target
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=False,
        )
    ).eval()
    assert not model.load_state_dict(weights, strict=False).missing_keys
    return model


def reference_logits(llama: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = llama(torch.tensor([tokens])).logits[0].numpy()
    return logits


def reference(
    llama: Any, prompt: Sequence[int], new: int, choose: Any = lambda row, place: int(row.argmax())
) -> list[int]:
    """A full forward over everything for every token."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(choose(reference_logits(llama, tokens)[-1], len(tokens)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_those_of_transformers(llama: Any, ngram: Any, prompt: list[int]) -> None:
    assert run(ngram, prompt, 40, 8)[0] == reference(llama, prompt, 40)


def test_sampled_tokens_are_the_inverse_cdf_of_each_position(llama: Any, ngram: Any) -> None:
    draws = uniforms(5, 256)

    def choose(row: NDArray[np.float32], place: int) -> int:
        weights = np.exp((row.astype(np.float64) - row.max()) / 0.9)
        return int((weights.cumsum() <= draws[place] * weights.sum()).sum())

    expected = reference(llama, PROMPTS[0], 40, choose)
    assert run(ngram, PROMPTS[0], 40, 8, SamplingParams(0.9, seed=5))[0] == expected


@pytest.mark.parametrize("size", [None, 1, 3, 200])
def test_scores_are_those_of_transformers(llama: Any, ngram: Any, size: int | None) -> None:
    tokens = (PROMPTS[2] * 2)[:50]
    assert np.abs(ngram.score(tokens, size) - reference_logits(llama, tokens)).max() < 1e-4


@pytest.mark.parametrize("nodes", [1, 4, 8])
def test_a_stop_token_inside_an_accepted_block_cuts_there(ngram: Any, nodes: int) -> None:
    plain = run(ngram, LOOP, 40, 1)[0]
    for token in dict.fromkeys(plain):
        at = plain.index(token)
        tokens, finish, stats = run(ngram, LOOP, 40, nodes, stop_ids=(999, token))
        assert (tokens, finish) == (plain[:at], "stop")
        assert stats.tokens == at  # the prefill's token doesn't count, the stop token does


@pytest.mark.parametrize("new", [1, 2, 5, 8, 9])
def test_the_limit_inside_an_accepted_block_cuts_there(ngram: Any, new: int) -> None:
    plain = run(ngram, LOOP, 40, 1)[0]
    tokens, finish, stats = run(ngram, LOOP, new, 8)
    assert (tokens, finish) == (plain[:new], "length")
    assert stats.tokens == new - 1
    assert stats.steps == (0 if new == 1 else -(-(new - 1) // 8))


def test_a_perfect_drafter_commits_depth_plus_one_tokens_a_step(ngram: Any) -> None:
    for nodes in (4, 8):
        _, _, stats = run(ngram, LOOP, 64, nodes)
        assert stats.tau == nodes
        assert stats.acceptance_by_depth == [1.0] * (nodes - 1)
        assert stats.committed[-1] == stats.steps == -(-63 // nodes)


class Drafted:
    """The engine with its drafts overwritten: by what comes next, or by anything but that."""

    def __init__(self, engine: Any, expected: Sequence[int], right: bool) -> None:
        self.engine, self.expected, self.right = engine, expected, right
        self.count = 0

    @property
    def verified(self) -> int:
        verified: int = self.engine.verified
        return verified

    @property
    def seconds(self) -> float:
        seconds: float = self.engine.seconds
        return seconds

    def prefill(self, request: Request, nodes: int, row: int) -> list[int]:
        tokens: list[int] = self.engine.prefill(request, nodes, row)
        self.count = len(tokens)
        return tokens

    def step(self, nodes: int) -> list[list[int]]:
        depths = self.engine.manifest.trees[str(nodes)].depths
        row = self.engine.buffers.sets[self.engine.turn][f"tokens_{nodes}"][0]
        for node in range(1, nodes):
            right = self.expected[self.count + depths[node] - 1]
            row[node] = right if self.right else (right + node) % 260
        rows: list[list[int]] = self.engine.step(nodes)
        self.count += len(rows[0])
        return rows


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "warped"])
@pytest.mark.parametrize(("name", "nodes"), [("ngram", 8), ("medusa", 10)])
def test_perfect_and_always_wrong_drafts(
    request: pytest.FixtureRequest, name: str, nodes: int, params: SamplingParams
) -> None:
    engine = request.getfixturevalue(name)
    plain = run(engine, PROMPTS[0], 80, 1, params)[0]
    depth = engine.manifest.trees[str(nodes)].depth
    tokens, _, stats = run(Drafted(engine, plain, False), PROMPTS[0], 40, nodes, params)
    assert tokens == plain[:40] and stats.tau == 1.0
    if name == "ngram":  # in a tree, equal siblings would not be a valid draft
        tokens, _, stats = run(Drafted(engine, plain, True), PROMPTS[0], 40, nodes, params)
        assert tokens == plain[:40] and stats.tau == depth + 1


@pytest.mark.parametrize("nodes", [1, 8])
def test_the_context_ends_an_answer_in_mid_step(ngram: Any, llama: Any, nodes: int) -> None:
    tokens, finish, stats = run(ngram, LOOP, 1000, nodes)
    assert len(LOOP) + len(tokens) == ngram.context and finish == "length"
    assert stats.steps == (len(tokens) - 1 if nodes == 1 else -(-(len(tokens) - 1) // 8))
    assert tokens == reference(llama, LOOP, len(tokens))


def test_a_prompt_that_fills_the_context_leaves_room_for_nothing(ngram: Any) -> None:
    assert run(ngram, [5] * ngram.context, 10, 8)[:2] == ([], "length")
    tokens, finish, _ = run(ngram, [5] * (ngram.context - 1), 10, 8)
    assert len(tokens) == 1 and finish == "length"


@pytest.mark.parametrize("length", [0, 10_000])
def test_a_prompt_of_no_or_too_many_tokens_is_refused(ngram: Any, length: int) -> None:
    with pytest.raises(ForerunError, match=f"the prompt has {length} tokens; this bundle takes 1"):
        run(ngram, [5] * length, 10, 8)
    assert run(ngram, PROMPTS[0], 5, 8)[1] == "length"


def test_a_second_request_sees_nothing_of_the_first(tiny_bundle: Path, ngram: Any) -> None:
    fresh = load_engine(load_bundle(tiny_bundle), threads=1)
    first = run(fresh, PROMPTS[0], 40, 8)[0]
    run(fresh, [6] * 200, 20, 8, PARAMS[1])
    half = decode(fresh, Request(PROMPTS[1], 60), 8)
    next(half)
    half.close()
    assert run(fresh, PROMPTS[0], 40, 8)[0] == first == run(ngram, PROMPTS[0], 40, 8)[0]


def test_statistics_of_an_answer_that_was_cut_off(ngram: Any) -> None:
    decoding = decode(ngram, Request(PROMPTS[0], 60), 1)
    for _ in range(4):
        next(decoding)
    decoding.close()
    assert list(decoding) == []
    assert decoding.stats.steps == decoding.stats.tokens == 3
    assert 0 < decoding.stats.engine_seconds < decoding.stats.wall_seconds
    assert 0 < decoding.stats.host_share < 1


def test_the_callers_own_time_is_the_hosts(ngram: Any) -> None:
    import time

    decoding = decode(ngram, Request(PROMPTS[0], 20), 1)
    for _ in decoding:
        time.sleep(0.01)
    assert decoding.stats.wall_seconds > 0.13
    assert decoding.stats.host_share > 0.5


def test_statistics() -> None:
    stats = Stats(0.5, 4.0, 3.0, 7, (1, 0, 2)) + Stats(0.5, 4.0, 3.0, 1, (1,))
    assert stats == Stats(1.0, 8.0, 6.0, 8, (2, 0, 2))
    assert (stats.steps, stats.tau, stats.tokens_per_s, stats.host_share) == (4, 2.0, 1.0, 0.25)
    assert stats.acceptance_by_depth == [0.5, 0.5]
    empty = Stats() + Stats()
    assert empty == Stats() and empty.acceptance_by_depth == []
    assert (empty.steps, empty.tau, empty.tokens_per_s, empty.host_share) == (0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("committed", "room", "block"),
    [
        ([1, 2, 3], 10, Block((1, 2, 3), None, 2)),
        ([1, 2, 3], 3, Block((1, 2, 3), "length", 2)),
        ([1, 2, 3], 2, Block((1, 2), "length", 2)),
        ([], 5, Block((), "length")),
        ([1, 0, 3], 10, Block((1,), "stop", 1)),
        ([0, 2], 10, Block((), "stop")),
        ([1, 2, 0], 2, Block((1, 2), "length", 2)),
        ([1, 0], 2, Block((1,), "stop", 1)),
    ],
)
def test_cut(committed: list[int], room: int, block: Block) -> None:
    assert cut(committed, room, {0, 9}) == block
