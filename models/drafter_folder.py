"""What all drafter folders have in common: a configuration, a file of tensors, expected shapes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.hf_config import Fields, read_rope
from forerun.models.rope import inverse_frequencies


def find_weights(folder: Path, names: Sequence[str], what: str) -> Path:
    """The first of the files `names` that is there."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise ForerunError(f"{folder}: no {what}: expected one of {', '.join(names)}")
    return path


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a .safetensors file, or from a pickle that holds nothing else.

    Raises ForerunError, and executes nothing, where the file is damaged or holds code.
    """
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ForerunError(
            f"{path}: not a plain file of tensors, so not loaded: {_line(error)}"
        ) from None
    except Exception as error:  # a damaged pickle fails in whatever way its bytes happen to
        raise ForerunError(f"{path}: damaged: {_line(error)}: download it again") from None
    if not isinstance(tensors, dict) or not tensors:
        raise ForerunError(f"{path}: holds no tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ForerunError(f"{path}: {name!r} is not a tensor with a name")
    return tensors


def read_under(paths: Sequence[Path], prefix: str) -> dict[str, Tensor]:
    """The tensors of several .safetensors files whose names start with `prefix`, without it."""
    found: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except Exception as error:  # the library raises its own class, and OSError
            raise ForerunError(f"{path}: damaged: {_line(error)}: download it again") from None
    return found


def tensor_names(path: Path) -> set[str]:
    """The keys of a file of tensors; those of a .safetensors file without reading the tensors."""
    if path.suffix != ".safetensors":
        return set(read_tensors(path))
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except Exception as error:  # the library raises its own class, and OSError
        raise ForerunError(f"{path}: damaged: {_line(error)}: download it again") from None


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Sequence[int]],
    path: Path,
    what: str,
    optional: Sequence[str] = (),
) -> None:
    """Exactly the keys `expected` (those in `optional` may be absent), as floats of their shapes.

    `what` names the owner of the keys in an error ("a Medusa head's").
    """
    for name, shape in expected.items():
        if name not in tensors:
            if name in optional:
                continue
            raise ForerunError(f"{path}: the key {name!r} is missing")
        tensor = tensors[name]
        if list(tensor.shape) != list(shape):
            raise ForerunError(
                f"{path}: {name!r} has shape {list(tensor.shape)}, expected {list(shape)}: "
                "this drafter belongs to another target"
            )
        if not tensor.is_floating_point():
            raise ForerunError(f"{path}: {name!r} is of type {tensor.dtype}, expected floats")
    for name in sorted(tensors.keys() - expected.keys()):
        raise ForerunError(f"{path}: unknown key {name!r}: not {what}")


def take_vocabulary(tensors: dict[str, Tensor], vocabulary: int, path: Path) -> Tensor | None:
    """Takes `d2t` and `t2d` out of `tensors` -> the token ids of a reduced vocabulary.

    They are as `vocabulary_tensors` makes them; `t2d`, which says the same again, may be absent.
    """
    offsets, kept = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if kept is not None:
            raise ForerunError(f"{path}: the key 'd2t' is missing, but 't2d' is there")
        return None
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1 or not len(offsets):
        raise ForerunError(
            f"{path}: 'd2t' must be a list of int32 or int64, found {offsets.dtype} "
            f"{list(offsets.shape)}"
        )
    ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(set(ids.tolist())) != len(ids):
        raise ForerunError(
            f"{path}: 'd2t' leads to token ids from {int(ids.min())} to {int(ids.max())}, expected "
            f"distinct ones of the target's {vocabulary}: this drafter belongs to another target"
        )
    if kept is not None and (
        list(kept.shape) != [vocabulary]
        or kept.bool().nonzero()[:, 0].tolist() != sorted(ids.tolist())
    ):
        raise ForerunError(f"{path}: 't2d' does not name the tokens that 'd2t' leads to")
    return ids


def vocabulary_tensors(ids: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """A reduced vocabulary of token `ids` `[V']` as published folders say it: `d2t` holds what to
    add to a draft id, `t2d` which of the target's tokens have one."""
    kept = torch.zeros(vocabulary, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": kept}


def read_layer(fields: Fields, head_dim: int | None = None) -> DraftLayerConfig:
    """The sizes of a drafter's layers, by the names that Hugging Face configurations have.

    `head_dim` is taken where `fields` name none (None: the hidden size shared among the heads).
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of {heads}", kv_heads)
    dim = fields.integer("head_dim", head_dim or max(hidden // heads, 1))
    positions = fields.integer("max_position_embeddings")
    rope = read_rope(fields, dim, positions, 10_000.0)
    try:
        inverse_frequencies(rope, positions, capacity=1)
    except ForerunError as error:
        raise ForerunError(f"{fields.where}: {error}") from None
    return DraftLayerConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_positions=positions,
        rope=rope,
    )


def layer_facts(layer: DraftLayerConfig) -> dict[str, Any]:
    """The fields that `read_layer` reads."""
    return {
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_positions,
        "rope_theta": layer.rope.theta,
        "partial_rotary_factor": layer.rope.dim / layer.head_dim,
        "rope_scaling": {"rope_type": layer.rope.kind, **layer.rope.scaling},
    }


def write_folder(
    folder: Path, weights: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes `config.json` and the file `weights` (safetensors), each seen only when complete."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / weights, tensors)
    write_text(folder / "config.json", json.dumps(config, indent=1) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, seen only when complete."""
    part = path.with_name(f"{path.name}.part")
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, part, metadata={"format": "pt"})  # transformers asks for this line
    part.replace(path)


def write_text(path: Path, text: str) -> None:
    """A text file, seen only when complete."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
