"""The target against transformers: every architecture and rope scaling, and the real SmolLM2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.compiler.certificate import float32_logits
from forerun.models.checkpoint import load_checkpoint
from forerun.models.target import Target

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-biased": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
}


def tiny_folder(folder: Path, name: str, changes: dict, rope: dict | None = None):
    """A random model of that architecture, saved by transformers with a tokenizer."""
    from tokenizers import Tokenizer, models

    theta = {"rope_theta": 10000.0}
    config = getattr(transformers, name)(
        **SIZES, **changes, rope_parameters=theta | (rope or ROPE["default"])
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    Tokenizer(models.BPE({f"t{i}": i for i in range(97)}, [])).save(str(folder / "tokenizer.json"))
    return model


def assert_parity(folder: Path, model) -> None:
    checkpoint = load_checkpoint(folder)
    target = Target(checkpoint.config, checkpoint.weights, 64).eval()
    tokens = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits[0]
    torch.testing.assert_close(
        float32_logits(target, tokens[0].tolist()), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(tmp_path, architecture):
    name, changes = ARCHITECTURES[architecture]
    assert_parity(tmp_path, tiny_folder(tmp_path, name, changes))


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling_equals_transformers(tmp_path, kind):
    assert_parity(tmp_path, tiny_folder(tmp_path, "LlamaConfig", {}, ROPE[kind]))


@pytest.mark.slow
def test_smollm2_equals_transformers():
    pytest.importorskip("gguf")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from forerun.models.checkpoint import shipped_file

    checkpoint = load_checkpoint("smollm2")
    # The reference reads the file with its own reader; only the arithmetic is torch's in both.
    read = load_gguf_checkpoint(str(shipped_file("smollm2")), return_tensors=False)
    config = transformers.LlamaConfig(**read["config"])
    config.attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    state = dict(checkpoint.weights)  # bit-equal to transformers' own reading: test_gguf.py
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    tokens = checkpoint.tokenizer.encode("The capital of France is Paris, and").ids
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    target = Target(checkpoint.config, checkpoint.weights, 64).eval()
    # Logits of some tens, 30 layers: 1e-4 of their scale.
    scale = float(expected.abs().max())
    torch.testing.assert_close(float32_logits(target, tokens), expected, atol=1e-4 * scale, rtol=0)
