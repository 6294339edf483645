"""Bundles of tiny random targets, exported once a session and run by ONNX Runtime."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forerun.runtime.bundle import write_manifest
from forerun.runtime.manifest import (
    CONTRACT,
    DrafterFacts,
    EngineFacts,
    Manifest,
    StateFacts,
    TargetFacts,
)
from forerun.runtime.tree import Tree

CAPACITY, PENDING, CHUNK = 256, 8, 16
STOP_ID = 257
LOOP = list(range(40, 50))
"""Tokens (the letters I to R) that the tiny target says in this order, round and round."""
VOCABULARY = 260
"""256 bytes, <s>, </s>, and two ids that the tokenizer doesn't know."""


@pytest.fixture(scope="session")
def tiny_target() -> tuple[Any, dict[str, Any]]:
    """(configuration, weights) of a random Llama of two layers."""
    torch = pytest.importorskip("torch")
    from forerun.models.config import RopeConfig, TargetConfig

    hidden, inner, heads, kv_heads, head = 32, 48, 4, 2, 8
    config = TargetConfig(
        *("llama", VOCABULARY, hidden, inner, 2, heads, kv_heads, head, 1e-5, CAPACITY),
        RopeConfig(10000.0, head),
    )
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, hidden),
        "model.norm.weight": 1 + random(hidden),
        "lm_head.weight": random(VOCABULARY, hidden),
    }
    for layer in range(config.num_layers):
        shapes = {
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (kv_heads * head, hidden),
            "self_attn.v_proj": (kv_heads * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = 1 + random(hidden)
    embed, head_rows = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    for token, following in zip(LOOP, LOOP[1:] + LOOP[:1], strict=True):
        embed[token] *= 50
        head_rows[following] += 2 * embed[token] / embed[token].norm()
    return config, weights


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and two special ones: every text has ids below the vocabulary's end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def tiny_checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte tokenizer, as transformers would save it."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

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
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def tiny_manifest(drafter: Any, trees: dict[int, Tree | None]) -> Manifest:
    """The manifest of a bundle around the tiny target."""
    return Manifest(
        contract=CONTRACT,
        forerun="0",
        target=TargetFacts(
            *("tiny", "llama", VOCABULARY, 2, 2, 8, CAPACITY, (STOP_ID,), "<s>", "</s>"),
            add_bos=True,
        ),
        drafter=DrafterFacts(
            drafter.kind,
            drafter.kind,
            {},
            tuple(StateFacts(state.name, state.cache) for state in drafter.states()),
            drafter.tables,
            candidates=drafter.candidates,
            per_depth=drafter.per_depth,
        ),
        engine=EngineFacts("ort", "model.onnx", (), {}),
        precision="fp32",
        capacity=CAPACITY,
        pending=PENDING,
        chunk=CHUNK,
        trees={str(size): tree for size, tree in trees.items()},
        default_tree=str(max(trees)),
        recipe="tiny",
    )


def write_tiny(
    folder: Path, target: tuple[Any, dict[str, Any]], make: Callable[[], Any], sizes: list[int]
) -> Path:
    """Exports the tiny target with the drafter that `make` gives into a bundle."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from forerun.compiler.export import export_step
    from forerun.models.step import Step
    from forerun.models.target import Target

    config, weights = target
    drafter = make()
    step = Step(Target(config, weights, CAPACITY), drafter, PENDING)
    export_step(step, folder / "model.onnx")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    prompts = [
        f'{{"prompt": "prompt {number}, abab", "category": "p{number % 2}"}}\n'
        for number in range(50)
    ]
    (folder / "prompts.jsonl").write_text("".join(prompts))
    trees = {size: drafter.tree(size) for size in sizes}
    write_manifest(folder, tiny_manifest(drafter, trees))
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Path]:
    """`once(name, make)`: a folder that `make(folder)` fills once for all of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def filled(name: str, make: Callable[[Path], Any]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def write_bundle() -> Callable[..., Path]:
    """`write_tiny`, for tests that bring a drafter of their own."""
    return write_tiny


@pytest.fixture(scope="session")
def tiny_bundle(once: Callable[..., Path], tiny_target: tuple[Any, dict[str, Any]]) -> Path:
    """The tiny target with prompt lookup: chains of 1, 4 and 8."""
    pytest.importorskip("torch")
    from forerun.models.ngram import NGram

    def make() -> Any:
        return NGram(PENDING - 1, 4, 1)

    return once("tiny", lambda folder: write_tiny(folder, tiny_target, make, [1, 4, 8]))


def tiny_medusa(target: tuple[Any, dict[str, Any]]) -> Any:
    """Three random Medusa heads for the tiny target."""
    import torch

    from forerun.models.linear import Linear
    from forerun.models.medusa import Medusa, MedusaConfig

    config, weights = target
    generator = torch.Generator().manual_seed(1)
    size = config.hidden_size
    blocks = [[Linear(torch.randn(size, size, generator=generator) * 0.1)] for _ in range(3)]
    accuracy = ((0.5, 0.3, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.05))
    shared = Linear(weights["lm_head.weight"].T)
    return Medusa(MedusaConfig(3, 1, size, 3, accuracy), blocks, [shared])


@pytest.fixture(scope="session")
def tiny_medusa_bundle(once: Callable[..., Path], tiny_target: tuple[Any, dict[str, Any]]) -> Path:
    """The tiny target with three random Medusa heads: trees of 1, 6 and 10."""

    def make() -> Any:
        return tiny_medusa(tiny_target)

    return once("tiny-medusa", lambda folder: write_tiny(folder, tiny_target, make, [1, 6, 10]))


@pytest.fixture(scope="session")
def tiny_combined_bundle(
    once: Callable[..., Path], tiny_target: tuple[Any, dict[str, Any]]
) -> Path:
    """The tiny target with those heads and prompt lookup: trees of 1, 6 and 10."""

    def make() -> Any:
        from forerun.models.combined import Combined
        from forerun.models.growing import as_growing

        return Combined(as_growing(tiny_medusa(tiny_target)), PENDING - 1)

    return once("tiny-combined", lambda folder: write_tiny(folder, tiny_target, make, [1, 6, 10]))


@pytest.fixture(scope="session")
def make_bundle(tiny_target: tuple[Any, dict[str, Any]]) -> Callable[..., Path]:
    """`make_bundle(folder, make, sizes)`: the tiny target with the drafter that `make` gives."""

    def make(folder: Path, drafter: Callable[[], Any], sizes: list[int]) -> Path:
        return write_tiny(folder, tiny_target, drafter, sizes)

    return make
