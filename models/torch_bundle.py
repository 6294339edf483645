"""A step as a torch bundle holds it: the target's tensors, the drafter's folder, and facts in JSON.

Nothing is pickled, and nothing but what the manifest lists is read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.combined import SUFFIX
from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.drafter_folder import read_tensors, read_under, write_tensors, write_text
from forerun.models.drafters import DrafterSource, load_drafter
from forerun.models.hf_folder import find_shards
from forerun.models.mtp import Mtp
from forerun.models.step import Step
from forerun.models.stored import cast
from forerun.models.target import Target
from forerun.models.weights import MTP_PREFIX, check_shapes
from forerun.runtime.bundle import Bundle

STEP_FILE = "step.json"
WEIGHTS_FILE = "target.safetensors"
DRAFTER = "drafter"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KEPT = (".json", ".jinja", ".safetensors", ".gguf")
"""Endings of the files that drafters are read from."""
PICKLED = {
    "medusa_lm_head.pt": "medusa_lm_head.safetensors",
    "pytorch_model.bin": "model.safetensors",
}
"""Published files that hold a plain dictionary of tensors, and where those are looked for first."""


def write_step(
    folder: Path,
    checkpoint: Checkpoint,
    source: DrafterSource,
    precision: str,
    attention: str,
    acceptance: str,
) -> None:
    """Writes what `read_step` builds the step from, into the bundle's `folder`."""
    dtype = DTYPES[precision]
    weights = dict(cast(checkpoint.weights, dtype))
    write_tensors(folder / WEIGHTS_FILE, weights)
    facts = {
        "target": asdict(checkpoint.config),
        "attention": attention,
        "drafter": _copy_drafter(source, folder),
        "acceptance": acceptance,
    }
    write_text(folder / STEP_FILE, json.dumps(facts, indent=1, allow_nan=False) + "\n")


def read_step(bundle: Bundle) -> Step:
    """The step of a torch bundle, on the CPU and in the bundle's precision.

    Raises ForerunError where a file is damaged or is not the one that was written.
    """
    path, manifest = bundle.file(STEP_FILE), bundle.manifest
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        config = _config(facts["target"])
        attention, acceptance = str(facts["attention"]), str(facts["acceptance"])
        place = facts["drafter"]
        dtype = DTYPES[manifest.precision]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ForerunError(f"{path}: not a step's facts: {error}: compile it again") from None
    weights = read_tensors(bundle.file(WEIGHTS_FILE))
    check_shapes({n: tuple(w.shape) for n, w in weights.items()}, config, WEIGHTS_FILE)
    checkpoint = _checkpoint(bundle, config, weights)
    folder = None if place is None else _listed(bundle, str(place))
    kind = manifest.drafter
    source = DrafterSource(kind.name.removesuffix(SUFFIX), kind.kind, folder, kind.digest)
    drafter = load_drafter(source, checkpoint, manifest.capacity, acceptance)
    drafter.trim(sorted(map(int, manifest.trees)))
    target = Target(config, weights, manifest.capacity, attention)
    return Step(target, drafter, manifest.pending).eval().to(dtype)


def _copy_drafter(source: DrafterSource, folder: Path) -> str | None:
    """Copy what the drafter is read from; -> its path in the bundle, None where nothing is read."""
    if source.folder is None:
        return None
    copy = folder / DRAFTER
    copy.mkdir()
    if source.folder.is_file():
        shutil.copyfile(source.folder, copy / source.folder.name)
        return f"{DRAFTER}/{source.folder.name}"
    if source.kind.removesuffix(SUFFIX) == Mtp.kind:
        block = read_under(find_shards(source.folder), MTP_PREFIX)
        if block:  # it lies among the target's own tensors, which are here already
            write_tensors(copy / "model.safetensors", block)
            shutil.copyfile(source.folder / "config.json", copy / "config.json")
            return DRAFTER
    for path in sorted(source.folder.iterdir()):
        if path.suffix in KEPT and path.is_file():
            shutil.copyfile(path, copy / path.name)
        elif path.name in PICKLED and not (source.folder / PICKLED[path.name]).exists():
            tensors = {name: tensor.clone() for name, tensor in read_tensors(path).items()}
            write_tensors(copy / PICKLED[path.name], tensors)
    return DRAFTER


def _listed(bundle: Bundle, place: str) -> Path:
    """The drafter's folder or file, of which every part is in the manifest."""
    parts = Path(place).parts
    if parts[:1] != (DRAFTER,) or ".." in parts:
        raise ForerunError(f"{bundle.path / STEP_FILE}: drafter {place!r}: not in the bundle")
    path = bundle.path / place
    if path.is_file():
        return bundle.file(place)
    for found in path.rglob("*"):
        if found.is_file():
            bundle.file(found.relative_to(bundle.path).as_posix())
    return path


def _config(values: Mapping[str, Any]) -> TargetConfig:
    flags = {name: tuple(values[name]) for name in ("sliding_layers", "rope_layers")}
    return TargetConfig(**{**values, **flags, "rope": RopeConfig(**values["rope"])})


def _checkpoint(bundle: Bundle, config: TargetConfig, weights: dict[str, Tensor]) -> Checkpoint:
    """The target as drafters are loaded beside it."""
    facts = bundle.manifest.target
    return Checkpoint(
        name=facts.name,
        config=config,
        weights=weights,
        tokenizer=bundle.tokenizer,
        chat_template=bundle.chat_template,
        bos_token=facts.bos_token,
        eos_token=facts.eos_token,
        stop_ids=facts.stop_ids,
        add_bos=facts.add_bos,
        digest=facts.digest,
    )
