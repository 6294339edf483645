"""Medusa heads on disk: our folders, and those that Medusa's authors publish."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.drafter_folder import (
    check_tensors,
    find_weights,
    read_tensors,
    write_folder,
)
from forerun.models.linear import Linear
from forerun.models.medusa import Medusa, MedusaConfig

WEIGHTS = "medusa.safetensors"
FILES = (WEIGHTS, "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Weight files by name, the first one present is read; the .pt holds a plain state dict."""
PREFIX = "medusa_head."
"""What merged checkpoints put before every key."""
TOP_K = 10
_LAYER = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})\.(linear\.weight|linear\.bias|weight)")


def load_medusa(folder: Path, head_weight: Tensor) -> Medusa:
    """The heads in `folder`, in float32.

    `head_weight` `[V, H]` is the target's vocabulary matrix: heads without a vocabulary layer of
    their own share it, or its rows `ids` where the folder names a reduced vocabulary. Raises
    ForerunError for a file that is absent, damaged or untrustworthy, and for a key that is missing,
    unknown, mis-shaped or of a wrong type.
    """
    path = find_weights(folder, FILES, "Medusa heads")
    facts = _read_config(folder / "config.json")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(path).items()}
    vocabulary, hidden = head_weight.shape
    ids = _check_ids(tensors.pop("ids", None), vocabulary, path)
    heads, layers = _count(tensors, path)
    _check_shapes(tensors, heads, layers, hidden, vocabulary if ids is None else len(ids), path)
    config = _config(facts, heads, layers, hidden, folder / "config.json")

    def linear(name: str) -> Linear:
        bias = tensors.get(f"{name}.bias")
        weight = tensors[f"{name}.weight"].to(torch.float32).T
        return Linear(weight, None if bias is None else bias.to(torch.float32))

    blocks = [[linear(f"{i}.{j}.linear") for j in range(layers)] for i in range(heads)]
    if f"0.{layers}.weight" in tensors:
        outputs = [linear(f"{i}.{layers}") for i in range(heads)]
    else:
        shared = head_weight if ids is None else head_weight[ids]
        outputs = [Linear(shared.to(torch.float32).T)]
    return Medusa(config, blocks, outputs, ids)


def save_medusa(
    folder: Path,
    config: MedusaConfig,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Writes `config.json` and `medusa.safetensors`, `tensors` by their published names.

    `facts` joins the configuration: which target the heads belong to, and how they were made.
    """
    write_folder(folder, WEIGHTS, {"kind": "medusa", **asdict(config), **facts}, tensors)


def _read_config(path: Path) -> dict[str, Any]:
    """The folder's facts; none where there is no such file, as in early published folders."""
    if not path.exists():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ForerunError(f"{path}: not a JSON file: {error}") from None
    if not isinstance(facts, dict):
        raise ForerunError(f"{path}: must be a JSON object")
    if facts.get("kind", "medusa") != "medusa":
        raise ForerunError(f"{path}: kind is {facts['kind']!r}, not 'medusa'")
    return facts


def _check_ids(ids: Tensor | None, vocabulary: int, path: Path) -> Tensor | None:
    if ids is None:
        return None
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not len(ids):
        raise ForerunError(
            f"{path}: 'ids' must be a list of int32 or int64, found {ids.dtype} {list(ids.shape)}"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ForerunError(
            f"{path}: 'ids' reaches from {int(ids.min())} to {int(ids.max())}, outside the "
            f"target's vocabulary of {vocabulary}: these heads belong to another target"
        )
    if len(set(ids.tolist())) != len(ids):
        raise ForerunError(f"{path}: 'ids' names a token twice: train or download the heads again")
    return ids.to(torch.int64)


def _count(tensors: Mapping[str, Tensor], path: Path) -> tuple[int, int]:
    """How many heads, and how many residual layers each, by the keys alone."""
    heads, layers = 0, 0
    for name in tensors:
        match = _LAYER.fullmatch(name)
        if match is None:
            raise ForerunError(f"{path}: unknown key {name!r}: not a Medusa head's")
        heads = max(heads, int(match[1]) + 1)
        if match[3] == "linear.weight":
            layers = max(layers, int(match[2]) + 1)
    if not layers:
        raise ForerunError(f"{path}: no residual layer: the key '0.0.linear.weight' is missing")
    return heads, layers


def _check_shapes(
    tensors: Mapping[str, Tensor], heads: int, layers: int, hidden: int, rows: int, path: Path
) -> None:
    own = any(name.endswith(f".{layers}.weight") for name in tensors)
    expected: dict[str, list[int]] = {}
    for i in range(heads):
        for j in range(layers):
            expected[f"{i}.{j}.linear.weight"] = [hidden, hidden]
            expected[f"{i}.{j}.linear.bias"] = [hidden]
        if own:
            expected[f"{i}.{layers}.weight"] = [rows, hidden]
    check_tensors(tensors, expected, path, "a Medusa head's")


def _config(
    facts: Mapping[str, Any], heads: int, layers: int, hidden: int, path: Path
) -> MedusaConfig:
    """What the folder says of itself, which must agree with its tensors."""
    for name, found in (("heads", heads), ("layers", layers), ("hidden_size", hidden)):
        # A published configuration may name more heads than its file holds, under other keys.
        if name in facts and facts[name] != found:
            raise ForerunError(f"{path}: {name} is {facts[name]!r}, but here it is {found}")
    top_k = facts.get("top_k", TOP_K)
    if type(top_k) is not int or top_k < 1:
        raise ForerunError(f"{path}: top_k is {top_k!r}: use a whole number from 1 on")
    accuracy = facts.get("accuracy", default_accuracy(heads, top_k))
    if not _is_table(accuracy, heads, top_k):
        raise ForerunError(
            f"{path}: accuracy must hold {heads} lists of {top_k} numbers between 0 and 1"
        )
    return MedusaConfig(heads, layers, hidden, top_k, tuple(tuple(row) for row in accuracy))


def _is_table(value: Any, heads: int, top_k: int) -> bool:
    def is_share(item: Any) -> bool:
        return type(item) in (int, float) and math.isfinite(item) and 0 <= item <= 1

    return (
        isinstance(value, list | tuple)
        and len(value) == heads
        and all(
            isinstance(row, list | tuple) and len(row) == top_k and all(map(is_share, row))
            for row in value
        )
    )


def default_accuracy(heads: int, top_k: int) -> Sequence[Sequence[float]]:
    """A guess for heads that come without measurements: each choice a third of the one before."""
    return [[0.6 * 0.7**head * 3.0**-choice for choice in range(top_k)] for head in range(heads)]
