"""The rewrites must leave the function alone: logits of transformers' own models as the judge."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forerun.compiler.quantize import input_hessian
from forerun.compiler.rotate import (
    mixing_matrix,
    original_basis,
    residual_rotation,
    rotate,
    rotate_values,
)
from forerun.compiler.smooth import smooth

SIZES = {
    "vocab_size": 50,
    "hidden_size": 36,  # no power of two
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
SHAPE = SimpleNamespace(
    num_layers=3, num_heads=6, num_kv_heads=2, head_dim=12, hidden_size=36, tie_embeddings=True
)
TOKENS = torch.arange(22).view(2, 11) * 7 % 50


def build(kind: str) -> torch.nn.Module:
    """A tiny model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(0)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    else:
        biased = kind == "biased"
        model = LlamaForCausalLM(
            LlamaConfig(
                **SIZES,
                tie_word_embeddings=kind == "tied",
                attention_bias=biased,
                mlp_bias=biased,
            )
        )
    for name, parameter in model.named_parameters():
        offset = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean=offset, std=0.3)
    return model.eval()


def outputs(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and final normed hidden states."""
    with torch.no_grad():
        result = model(TOKENS, output_hidden_states=True)
    return result.logits, result.hidden_states[-1]


def reload(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A model of the same kind with these weights, its head untied."""
    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": False})
    other = type(model)(config).eval()
    other.load_state_dict(weights)
    return other


KINDS = pytest.mark.parametrize("kind", ["tied", "untied", "biased", "qwen3"])


@KINDS
def test_rotated_model_computes_the_same(kind: str) -> None:
    model = build(kind)
    weights = model.state_dict()
    rotated = rotate(weights, SHAPE)
    logits, hidden = outputs(model)
    new_logits, new_hidden = outputs(reload(model, rotated))
    torch.testing.assert_close(new_logits, logits, atol=1e-4, rtol=1e-4)
    basis = original_basis(weights, SHAPE)
    back = (new_hidden @ basis.stream) * basis.gain
    torch.testing.assert_close(back, hidden, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(new_hidden, hidden, atol=0.1)


@KINDS
def test_smoothed_model_computes_the_same(kind: str) -> None:
    model = build(kind)
    weights = rotate(model.state_dict(), SHAPE)
    inputs = torch.randn(40, 44) * torch.logspace(-2, 2, 44)
    hessian = input_hessian(inputs)
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]
    smoothed, hessians = smooth(weights, SHAPE, dict.fromkeys(names, hessian))
    logits, _ = outputs(model)
    new_logits, _ = outputs(reload(model, smoothed))
    torch.testing.assert_close(new_logits, logits, atol=1e-4, rtol=1e-4)
    old, new = hessian.diagonal(), hessians[names[0]].diagonal()
    assert new.max() / new.min() < 0.1 * old.max() / old.min()


def test_smoothing_survives_silent_channels() -> None:
    weights = rotate(build("tied").state_dict(), SHAPE)
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)]
    smoothed, _ = smooth(weights, SHAPE, dict.fromkeys(names, torch.zeros(44, 44)))
    for name, value in smoothed.items():
        torch.testing.assert_close(value, weights[name])


def test_norms_become_ones_and_the_head_its_own() -> None:
    weights = build("tied").state_dict()
    del weights["lm_head.weight"]
    before = {name: value.clone() for name, value in weights.items()}
    rotated = rotate(weights, SHAPE)
    norms = [name for name in rotated if "norm" in name]
    assert len(norms) == 7
    assert all(torch.equal(rotated[name], torch.ones(36)) for name in norms)
    assert not torch.equal(rotated["lm_head.weight"], rotated["model.embed_tokens.weight"])
    for name, value in weights.items():
        assert torch.equal(value, before[name]), name  # the arguments are left as they were


def test_head_norms_are_left_alone() -> None:
    weights = build("qwen3").state_dict()
    rotated = rotate(weights, SHAPE)
    for name in weights:
        if "q_norm" in name or "k_norm" in name:
            assert torch.equal(rotated[name], weights[name])


def test_values_alone_can_be_rotated() -> None:
    model = build("biased")
    logits, hidden = outputs(model)
    new_logits, new_hidden = outputs(reload(model, rotate_values(model.state_dict(), SHAPE)))
    torch.testing.assert_close(new_logits, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(new_hidden, hidden, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 36, 64, 576])
def test_rotation_is_orthogonal_and_spreads_an_outlier(size: int) -> None:
    rotation = residual_rotation(size)
    identity = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.T, identity, atol=1e-10, rtol=0)
    assert rotation.abs().max() <= (2.0 / size) ** 0.5 + 1e-12


def test_rotation_depends_on_the_seed_alone() -> None:
    assert torch.equal(residual_rotation(36, 3), residual_rotation(36, 3))
    assert not torch.equal(residual_rotation(36, 3), residual_rotation(36, 4))
    assert mixing_matrix(12, torch.Generator().manual_seed(0)).shape == (12, 12)
