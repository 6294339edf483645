"""MTP drafters on disk: our folders, and targets that come with such a block (MiMo's layout).

MiMo keeps its block in the target's own shards, under `model.mtp_layers.0.`, and its sizes are the
target's. FastMTP has the same keys. Give the target's folder as the drafter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.checkpoint import Checkpoint
from forerun.models.config import TargetConfig
from forerun.models.draft_layer import projection_shapes
from forerun.models.drafter import NORMED
from forerun.models.drafter_folder import check_tensors, layer_facts, read_under, write_folder
from forerun.models.eagle import EagleConfig
from forerun.models.eagle_config import foreign, read_gated_layer, read_tree, refuse_quantised
from forerun.models.hf_config import Fields, read_json
from forerun.models.hf_folder import find_shards
from forerun.models.mtp import Mtp
from forerun.models.weights import MTP_PREFIX

WEIGHTS = "model.safetensors"
NORMS = ("token", "hidden", "input", "post_attention", "final")


def load_mtp(folder: Path, checkpoint: Checkpoint, capacity: int) -> Mtp:
    """The drafter in `folder`, in float32, for the target `checkpoint`.

    Raises ForerunError for a file that is absent, damaged or untrustworthy, for a field or key that
    is missing, unknown, mis-shaped or of a wrong type, and for what doesn't fit the target.
    """
    where = folder / "config.json"
    config = _config(Fields(read_json(where), str(where)), checkpoint.config)
    shards = find_shards(folder)
    tensors = read_under(shards, MTP_PREFIX) or read_under(shards, "")
    shapes = dict(_shapes(config))
    biases = [name for name in shapes if name.endswith(".bias")]
    check_tensors(tensors, shapes, folder, "an MTP block's", biases)
    return Mtp(config, {name: w.to(torch.float32) for name, w in tensors.items()}, capacity).eval()


def save_mtp(
    folder: Path, config: EagleConfig, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Writes `config.json` and `model.safetensors`, `tensors` by MiMo's names without a prefix.

    `facts` joins the configuration: which target the drafter belongs to, and how it was made.
    """
    values = {
        "kind": Mtp.kind,
        **layer_facts(config.layer),
        "num_nextn_predict_layers": 1,
        "tree": {"depth": config.depth, "top_k": config.top_k},
    }
    write_folder(folder, WEIGHTS, values | dict(facts), tensors)


def _config(fields: Fields, target: TargetConfig) -> EagleConfig:
    refuse_quantised(fields)
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    for name, expected in sizes.items():
        if fields.integer(name, expected) != expected:
            raise foreign(fields, name, expected)
    if fields.integer("num_nextn_predict_layers", 1) != 1:
        found = fields.values["num_nextn_predict_layers"]
        raise fields.error("num_nextn_predict_layers", "1: one block applied repeatedly", found)
    return EagleConfig(read_gated_layer(fields), (NORMED,), *read_tree(fields, top_k=1))


def _shapes(config: EagleConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every key that a block may have, and its shape."""
    hidden = config.layer.hidden_size
    yield "input_proj.weight", (hidden, 2 * hidden)
    for name in NORMS:
        yield f"{name}_layernorm.weight", (hidden,)
    yield from projection_shapes(config.layer)
