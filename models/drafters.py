"""The drafters that exist, by kind and by name. A new one is a module and a line of `DRAFTERS`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import SHIPPED, Checkpoint, digest_files, shipped_file
from forerun.models.combined import SUFFIX, Combined
from forerun.models.dflash_folder import load_dflash
from forerun.models.draft_folder import load_draft_model
from forerun.models.drafter import Drafter
from forerun.models.eagle_folder import eagle_kind, load_eagle
from forerun.models.growing import as_growing
from forerun.models.hf_config import read_json
from forerun.models.medusa_folder import load_medusa
from forerun.models.mtp_folder import load_mtp
from forerun.models.ngram import NGram


@dataclass(frozen=True)
class DrafterKind:
    """One kind of learned drafter."""

    load: Callable[[Path, Checkpoint, int], Drafter]
    """(its folder, the target's checkpoint, cache slots) -> drafter."""
    claims: Callable[[Path, Mapping[str, Any]], bool]
    """Whether a published folder, which names no kind, holds one: by its config.json, or else by
    its tensors."""


DRAFTERS: dict[str, DrafterKind] = {
    "medusa": DrafterKind(
        lambda folder, checkpoint, _: load_medusa(folder, vocabulary_matrix(checkpoint)),
        lambda _, config: "medusa_num_heads" in config,
    ),
    "dflash": DrafterKind(
        lambda folder, checkpoint, slots: load_dflash(folder, checkpoint.config, slots),
        lambda _, config: (
            "dflash_config" in config or config.get("speculators_model_type") == "dflash"
        ),
    ),
    "eagle3": DrafterKind(
        partial(load_eagle, "eagle3"),
        lambda folder, config: eagle_kind(folder, config) == "eagle3",
    ),
    "eagle": DrafterKind(
        partial(load_eagle, "eagle"),
        lambda folder, config: eagle_kind(folder, config) == "eagle",
    ),
    "mtp": DrafterKind(load_mtp, lambda _, config: bool(config.get("num_nextn_predict_layers"))),
    # A language model on its own drafts as it is: asked after all others.
    "draft": DrafterKind(load_draft_model, lambda _, config: _is_language_model(config)),
}
FOLDERLESS: dict[str, Callable[[], Drafter]] = {"plain": Drafter, "ngram": NGram}
"""Drafters that nothing is read for."""


@dataclass(frozen=True)
class DrafterSource:
    """A drafter that was named and found, not yet read."""

    name: str
    kind: str
    folder: Path | None
    """Or the .gguf file of a draft model."""
    digest: str
    """Hash of all that defines it."""

    @property
    def with_lookup(self) -> bool:
        """Whether prompt lookup drafts beside it."""
        return self.kind.endswith(SUFFIX)


def find_drafter(name: str) -> DrafterSource:
    """`plain`, `ngram`, a drafter folder, the name of a shipped drafter, or a draft model: a
    Hugging Face folder, a .gguf file, or the name of a shipped target.

    With `+ngram` at the end of a folder or name, prompt lookup drafts beside that drafter.
    """
    if name.endswith(SUFFIX) and not Path(name).is_dir():
        learned = find_drafter(name.removesuffix(SUFFIX))
        if learned.folder is None or learned.with_lookup:
            raise ForerunError(f"drafter {name!r}: {SUFFIX} goes behind a learned drafter's name")
        return replace(
            learned,
            name=learned.name + SUFFIX,
            kind=learned.kind + SUFFIX,
            digest=learned.digest + SUFFIX,
        )
    if name in FOLDERLESS:
        return DrafterSource(name, name, None, name)
    file = shipped_file(name) if name in SHIPPED else Path(name)
    if file.suffix == ".gguf" and file.is_file():
        return DrafterSource(file.stem, "draft", file, digest_files([file]))
    shipped = Path(str(resources.files("forerun.models"))) / "shipped"
    names = sorted(path.name for path in shipped.glob("*") if path.is_dir())
    # A folder given by its path wins over a shipped drafter of that name.
    folder = Path(name) if name not in names or Path(name).is_dir() else shipped / name
    if not (folder / "config.json").is_file():
        raise ForerunError(
            f"drafter {name!r}: neither a folder with a config.json, a .gguf file, "
            f"nor one of {', '.join([*FOLDERLESS, *names])}"
        )
    return DrafterSource(folder.name, _kind(folder), folder, _digest(folder))


def load_drafter(
    source: DrafterSource, checkpoint: Checkpoint, capacity: int, acceptance: str = "matching"
) -> Drafter:
    """The drafter as a module, its weights in float32 and in the checkpoint's own basis.

    Raises ForerunError where its drafts can't be accepted by the rule `acceptance`.
    """
    if source.folder is None:
        drafter = FOLDERLESS[source.kind]()
    else:
        kind = DRAFTERS[source.kind.removesuffix(SUFFIX)]
        drafter = kind.load(source.folder, checkpoint, capacity)
    if source.with_lookup:
        drafter = Combined(as_growing(drafter))
    drafter.accept_by(acceptance)
    return drafter


def vocabulary_matrix(checkpoint: Checkpoint) -> Tensor:
    """The target's vocabulary layer `[V, H]`, tied or not."""
    weights = checkpoint.weights
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def _kind(folder: Path) -> str:
    config = read_json(folder / "config.json")
    found = config.get("kind") or next(
        (kind for kind, entry in DRAFTERS.items() if entry.claims(folder, config)), "unknown"
    )
    if found not in DRAFTERS:
        raise ForerunError(
            f"{folder / 'config.json'}: unknown drafter kind {found!r}: "
            f"this version knows {', '.join([*FOLDERLESS, *DRAFTERS])}"
        )
    return str(found)


def _is_language_model(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(path.name.encode())
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
