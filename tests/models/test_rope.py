"""Rotary tables against transformers' own rotary embedding, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.errors import ForerunError
from forerun.models.config import RopeConfig
from forerun.models.rope import inverse_frequencies, rope_tables

HEAD_DIM, THETA, POSITIONS = 64, 50_000.0, 512
SHORT = [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.3 * i for i in range(HEAD_DIM // 2)]
SCALINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 4.0}),
    "dynamic": ("dynamic", {"factor": 4.0}),
    "llama3": (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "yarn": ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128}),
    "yarn-betas": (
        "yarn",
        {
            "factor": 40.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
    ),
    "yarn-mscale": (
        "yarn",
        {
            "factor": 40.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.707,
            "mscale_all_dim": 1.5,
        },
    ),
    "yarn-untruncated": (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
    ),
    "yarn-no-factor": ("yarn", {"factor": None, "original_max_position_embeddings": 128}),
    "longrope": (
        "longrope",
        {
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "longrope-no-factor": (
        "longrope",
        {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 128},
    ),
    "longrope-attention": (
        "longrope",
        {
            "short_factor": SHORT,
            "long_factor": LONG,
            "attention_factor": 1.5,
            "original_max_position_embeddings": 128,
        },
    ),
}


def reference_config(kind: str, scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **scaling},
    )


def rope(kind: str, scaling: dict[str, Any], dim: int = HEAD_DIM) -> RopeConfig:
    return RopeConfig(theta=THETA, dim=dim, kind=kind, scaling=scaling)


@pytest.mark.parametrize("capacity", [100, 400])
@pytest.mark.parametrize("case", SCALINGS)
def test_tables_equal_transformers_rotary_embedding(case: str, capacity: int) -> None:
    kind, scaling = SCALINGS[case]
    reference = LlamaRotaryEmbedding(reference_config(kind, scaling))
    # transformers chooses long or short factors by the largest position it is given.
    cos, sin = reference(torch.zeros(1), torch.arange(capacity)[None])
    ours = rope_tables(rope(kind, scaling), POSITIONS, capacity)
    half = HEAD_DIM // 2
    assert [table.shape for table in ours] == [(capacity, half)] * 2
    assert [table.dtype for table in ours] == [torch.float32] * 2
    torch.testing.assert_close(ours[0], cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(ours[1], sin[0, :, :half], atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", [case for case in SCALINGS if case != "default"])
def test_frequencies_equal_transformers_init_functions(case: str) -> None:
    kind, scaling = SCALINGS[case]
    for capacity in (100, 400):
        expected, factor = ROPE_INIT_FUNCTIONS[kind](
            reference_config(kind, scaling), device=torch.device("cpu"), seq_len=capacity
        )
        frequencies, attention = inverse_frequencies(rope(kind, scaling), POSITIONS, capacity)
        torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
        assert attention == pytest.approx(factor, rel=1e-12)


def test_longrope_chooses_by_capacity() -> None:
    kind, scaling = SCALINGS["longrope"]
    short, _ = inverse_frequencies(rope(kind, scaling), POSITIONS, 128)
    long, _ = inverse_frequencies(rope(kind, scaling), POSITIONS, 129)
    plain, _ = inverse_frequencies(rope("default", {}), POSITIONS, 128)
    torch.testing.assert_close(plain / short, torch.tensor(SHORT))
    torch.testing.assert_close(plain / long, torch.tensor(LONG))


def test_dynamic_beyond_its_range_is_refused() -> None:
    config = rope("dynamic", {"factor": 4.0})
    inside, _ = inverse_frequencies(config, POSITIONS, POSITIONS)
    assert torch.equal(inside, inverse_frequencies(rope("default", {}), POSITIONS, 1)[0])
    with pytest.raises(ForerunError, match=r"original range of 512 positions.*capacity is 513"):
        inverse_frequencies(config, POSITIONS, POSITIONS + 1)


def test_partial_rotation_uses_its_own_dimension() -> None:
    reference = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        rope_parameters={
            "rope_type": "linear",
            "factor": 2.0,
            "rope_theta": THETA,
            "partial_rotary_factor": 0.5,
        },
    )
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](reference, device=torch.device("cpu"))
    ours, _ = inverse_frequencies(rope("linear", {"factor": 2.0}, dim=32), POSITIONS, 1)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (rope("mrope", {}), "unknown rotary scaling 'mrope' .*dynamic, linear, llama3"),
        (rope("default", {}, dim=63), "63 dimensions"),
        (rope("default", {}, dim=0), "0 dimensions"),
        (RopeConfig(theta=0.0, dim=8), "rope_theta"),
        (RopeConfig(theta=float("nan"), dim=8), "rope_theta"),
        (RopeConfig(theta=1.0, dim=8, kind="yarn", scaling={"factor": 2.0}), "rope_theta"),
        (rope("linear", {}), "lacks 'factor'"),
        (rope("linear", {"factor": 0}), "'factor' must be a positive number, found 0"),
        (rope("linear", {"factor": "4"}), "'factor' must be a positive number, found '4'"),
        (rope("linear", {"factor": True}), "'factor' must be a positive number"),
        (rope("llama3", {"factor": 8.0}), "lacks 'low_freq_factor'"),
        (
            rope("llama3", {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0}),
            "low_freq_factor equals high_freq_factor",
        ),
        (rope("longrope", {"short_factor": [1.0]}), "'short_factor' must list 32"),
        (rope("longrope", {}), "'short_factor' must list 32"),
        (rope("longrope", {"short_factor": ["a"] * 32}), "'short_factor' must list 32"),
    ],
)
def test_errors_say_what_and_how_to_mend_it(config: RopeConfig, message: str) -> None:
    with pytest.raises(ForerunError, match=message) as caught:
        inverse_frequencies(config, POSITIONS, 1)
    assert "\n" not in str(caught.value)
