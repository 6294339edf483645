"""A tiny Hugging Face checkpoint for compiling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint_folder(tmp_path_factory) -> Path:
    """A random Llama of two layers with a byte tokenizer, as transformers would save it."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from forerun.models.hf_config import config_from_json, read_json
    from forerun.models.weights import tensor_shapes

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 260,
                "hidden_size": 48,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "eos_token_id": 257,
            }
        )
    )
    config = config_from_json(read_json(folder / "config.json"), "config.json")
    generator = torch.Generator().manual_seed(3)
    save_file(
        {
            name: torch.randn(*shape, generator=generator) * 0.3 + ("norm" in name)
            for name, shape in tensor_shapes(config)
        },
        folder / "model.safetensors",
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
