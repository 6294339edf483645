"""DFlash folders: what loads, what it means, and what is refused in one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.config import RopeConfig
from forerun.models.dflash import DFlash, DFlashConfig, DFlashTree
from forerun.models.dflash_folder import WEIGHTS, dflash_shapes, load_dflash, save_dflash
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.drafter import NORMED
from forerun.models.drafters import find_drafter

HIDDEN, CAPACITY = 32, 64
LAYER = DraftLayerConfig(HIDDEN, 40, 4, 2, 8, 1e-6, 256, RopeConfig(5000.0, 8))
CONFIG = DFlashConfig(LAYER, 2, (1, NORMED), 5, 7, budget=16)
QWEN3 = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 5000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
}
PUBLISHED = QWEN3 | {
    "block_size": 5,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1]},
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "aux_hidden_state_layer_ids": [1, 2],
    "block_size": 5,
    "mask_token_id": 7,
    "draft_vocab_size": 260,
    "transformer_layer_config": QWEN3
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 9,
    },
}


def tensors(config: DFlashConfig = CONFIG) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(*shape, generator=draw) * 0.4
        for name, shape in dflash_shapes(config)
        if not name.endswith(".bias")
    }


def write(folder: Path, config: dict[str, Any], found: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / WEIGHTS)
    return folder


@pytest.fixture
def load(tiny_target: Any) -> Callable[[Path], DFlash]:
    """Loads a folder for the tiny target: 2 layers, 260 tokens, 32 channels."""
    return lambda folder: load_dflash(folder, tiny_target[0], CAPACITY)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tree": False},
        {"window": 6, "sliding_layers": (False, True), "causal_layers": (True, False)},
        {"feature_layers": (2, 0, 1)},
        {"layer": replace(LAYER, rope=RopeConfig(1e4, 4, "linear", {"factor": 2.0}))},
    ],
)
def test_round_trip(load: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    flags = {"sliding_layers": (False, False), "causal_layers": (False, False)}
    config = replace(CONFIG, **(flags | changes))
    found = tensors(config)
    save_dflash(tmp_path, config, found, {"target": "tiny"})
    drafter = load(tmp_path)
    same = replace(drafter.config, sliding_layers=drafter.config.sliding_layers or (False, False))
    assert same == config
    assert isinstance(drafter, DFlashTree) == config.tree
    torch.testing.assert_close(drafter.fuse.weight, found["fc.weight"].T)
    assert find_drafter(str(tmp_path)).kind == "dflash"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]


def test_published_layer_ids_are_layers_whose_output_is_read(load: Any, tmp_path: Path) -> None:
    drafter = load(write(tmp_path, PUBLISHED, tensors()))
    assert drafter.feature_layers == (1, NORMED)  # transformers norms the last hidden state
    config = drafter.config
    assert (config.block_size, config.mask_token_id, config.tree) == (5, 7, True)
    assert config.layer == replace(LAYER, rope=RopeConfig(5000.0, 8))
    assert not any(config.sliding_layers) and not any(config.causal_layers)
    assert find_drafter(str(tmp_path)).kind == "dflash"


@pytest.mark.parametrize("causal", [None, True, False])
def test_sliding_layers_are_causal_unless_the_folder_says_otherwise(
    load: Any, tmp_path: Path, causal: bool | None
) -> None:
    config = PUBLISHED | SPECULATORS["transformer_layer_config"] | {"is_causal": causal}
    found = load(write(tmp_path, config, tensors())).config
    assert (found.window, found.sliding_layers) == (9, (True, False))
    assert found.causal_layers == ((True, False) if causal is None else (causal, causal))


def test_speculators_folders(load: Any, tmp_path: Path) -> None:
    copies = {
        "embed_tokens.weight": torch.zeros(260, HIDDEN),
        "lm_head.weight": torch.zeros(260, HIDDEN),
        "verifier_norm.weight": torch.zeros(HIDDEN),
    }
    drafter = load(write(tmp_path, SPECULATORS, tensors() | copies))
    assert drafter.feature_layers == (1, 2)
    assert drafter.head is None and drafter.ids is None
    assert (drafter.config.window, drafter.config.causal_layers) == (9, (True, False))
    loose = SPECULATORS | {"sliding_window_non_causal": True}
    assert not any(load(write(tmp_path, loose, tensors())).config.causal_layers)
    assert find_drafter(str(tmp_path)).kind == "dflash"


def test_a_reduced_vocabulary_maps_back(load: Any, tmp_path: Path) -> None:
    ids = torch.tensor([0, 3, 31, 258])
    kept = torch.zeros(260, dtype=torch.bool)
    kept[ids] = True
    head = torch.randn(4, HIDDEN)
    reduced = {"d2t": ids - torch.arange(4), "t2d": kept, "lm_head.weight": head}
    drafter = load(write(tmp_path, SPECULATORS | {"draft_vocab_size": 4}, tensors() | reduced))
    assert drafter.ids.tolist() == ids.tolist() and drafter.config.budget == 4
    torch.testing.assert_close(drafter.head.weight, head.T)
    hidden = torch.randn(1, 4, 4)
    assert drafter._tokens(hidden.argmax(-1)).tolist() == ids[hidden.argmax(-1)].tolist()


def test_half_precision_and_pickles_are_read_as_float32(load: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    halves = {name: tensor.half() for name, tensor in tensors().items()}
    torch.save(halves, tmp_path / "pytorch_model.bin")
    drafter = load(tmp_path)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}


def inner(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": PUBLISHED["dflash_config"] | changes}


FACTS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "eagle"}, "'kind' is 'eagle'"),
    "relative": ({"architectures": ["DFlash2DraftModel"]}, "'architectures' is 'DFlash2"),
    "mask outside": (inner(mask_token_id=260), "'mask_token_id' is 260, expected a whole number"),
    "mask negative": (inner(mask_token_id=-1), "'mask_token_id' is -1"),
    "mask missing": ({"dflash_config": {"target_layer_ids": [0]}}, "'mask_token_id' is missing"),
    "layer too high": (inner(target_layer_ids=[0, 2]), r"'target_layer_ids' is \[0, 2\]"),
    "layer negative": (inner(target_layer_ids=[-1]), "'target_layer_ids'"),
    "layer as bool": (inner(target_layer_ids=[True]), "'target_layer_ids'"),
    "no layers": (inner(target_layer_ids=[]), "'target_layer_ids'"),
    "layers missing": ({"dflash_config": {"mask_token_id": 7}}, "'target_layer_ids' is missing"),
    "own layer too high": ({"feature_layers": [3]}, r"'feature_layers' is \[3\]"),
    "block of one": ({"block_size": 1}, "'block_size' is 1, expected a whole number from 2"),
    "block as text": ({"block_size": "5"}, "'block_size' is '5'"),
    "unknown inner field": (inner(markov_rank=4), "'markov_rank' in dflash_config"),
    "scaled embedding": (inner(input_embedding_scale=2.0), "'input_embedding_scale' is 2.0"),
    "other width": ({"hidden_size": 64}, "'hidden_size' is 64, expected the target's, 32"),
    "heads": ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3, expected a divisor"),
    "activation": ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    "budget of one": ({"budget": 1}, "'budget' is 1"),
    "budget beyond": ({"budget": 262}, "'budget' is 262"),
    "tree as number": ({"tree": 1}, "'tree' is 1"),
    "flags": ({"causal_layers": [True]}, "causal_layers names 1 layers of 2"),
    "layer types": (
        {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 4},
        "sliding_layers names 1 layers of 2",
    ),
}


@pytest.mark.parametrize("case", FACTS)
def test_broken_facts(load: Any, tmp_path: Path, case: str) -> None:
    changes, message = FACTS[case]
    write(tmp_path, PUBLISHED | changes, tensors())
    with pytest.raises(ForerunError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and "config.json" in str(error.value)


def change(key: str, value: Any) -> Any:
    """An edit of a file's tensors: `value` None removes the key."""
    return lambda found: {
        name: tensor for name, tensor in {**found, key: value}.items() if tensor is not None
    }


BROKEN: dict[str, tuple[Any, str]] = {
    "unknown key": (change("layers.0.gate", torch.ones(2)), "unknown key 'layers.0.gate'"),
    "layer too many": (change("layers.2.mlp.up_proj.weight", torch.ones(2)), "'layers.2.mlp"),
    "missing": (change("fc.weight", None), "key 'fc.weight' is missing"),
    "no key norm": (change("layers.1.self_attn.k_norm.weight", None), "k_norm.weight' is missing"),
    "wrong width": (change("fc.weight", torch.ones(32, 96)), r"'fc.weight' has shape \[32, 96\]"),
    "wrong rank": (change("norm.weight", torch.ones(1, 32)), "'norm.weight' has shape"),
    "integers": (change("norm.weight", torch.ones(32, dtype=torch.int8)), "'norm.weight' is of t"),
    "wrong copy": (change("embed_tokens.weight", torch.ones(8, 32)), "'embed_tokens.weight' has"),
    "d2t as floats": (change("d2t", torch.ones(4)), "'d2t' must be a list of int"),
    "d2t out of range": (change("d2t", torch.tensor([0, 259])), "'d2t' leads to token ids"),
    "d2t twice": (change("d2t", torch.tensor([1, 0])), "'d2t' leads to"),
    "d2t without a head": (change("d2t", torch.tensor([1, 1])), "'lm_head.weight' is missing"),
    "t2d alone": (change("t2d", torch.ones(260)), "'d2t' is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors(load: Any, tmp_path: Path, case: str) -> None:
    edit, message = BROKEN[case]
    write(tmp_path, PUBLISHED, edit(tensors()))
    with pytest.raises(ForerunError, match=message) as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and WEIGHTS in str(error.value)


def test_t2d_must_say_the_same(load: Any, tmp_path: Path) -> None:
    reduced = {"d2t": torch.tensor([1, 1]), "t2d": torch.ones(260, dtype=torch.bool)}
    write(tmp_path, PUBLISHED, tensors() | reduced)
    with pytest.raises(ForerunError, match="'t2d' does not name"):
        load(tmp_path)


def test_nothing_there(load: Any, tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="no DFlash drafter: expected one of"):
        load(tmp_path)
