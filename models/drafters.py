"""The drafters that exist, by kind and by name. A new one is a module and a line of `DRAFTERS`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
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
from forerun.models.medusa_folder import load_medusa
from forerun.models.ngram import NGram


@dataclass(frozen=True)
class DrafterSource:
    """A drafter that was named and found, not yet read."""

    name: str
    kind: str
    folder: Path | None
    """Or the .gguf file of a draft model."""
    digest: str
    """Hash of all that defines it."""


def _plain(folder: Path | None, checkpoint: Checkpoint, capacity: int) -> Drafter:
    return Drafter()


def _ngram(folder: Path | None, checkpoint: Checkpoint, capacity: int) -> Drafter:
    return NGram()


def _medusa(folder: Path | None, checkpoint: Checkpoint, capacity: int) -> Drafter:
    assert folder is not None
    return load_medusa(folder, vocabulary_matrix(checkpoint))


def _draft(folder: Path | None, checkpoint: Checkpoint, capacity: int) -> Drafter:
    assert folder is not None
    return load_draft_model(folder, checkpoint, capacity)


def _dflash(folder: Path | None, checkpoint: Checkpoint, capacity: int) -> Drafter:
    assert folder is not None
    return load_dflash(folder, checkpoint.config, capacity)


def _eagle(kind: str) -> Callable[[Path | None, Checkpoint, int], Drafter]:
    def load(folder: Path | None, checkpoint: Checkpoint, capacity: int) -> Drafter:
        assert folder is not None
        return load_eagle(folder, kind, checkpoint, capacity)

    return load


DRAFTERS: dict[str, Callable[[Path | None, Checkpoint, int], Drafter]] = {
    "plain": _plain,
    "ngram": _ngram,
    "medusa": _medusa,
    "draft": _draft,
    "eagle": _eagle("eagle"),
    "eagle3": _eagle("eagle3"),
    "dflash": _dflash,
}
"""Kind -> (its folder, the target's checkpoint, cache slots) -> drafter."""
FOLDERLESS = ("plain", "ngram")


def find_drafter(name: str) -> DrafterSource:
    """`plain`, `ngram`, a drafter folder, the name of a shipped drafter, or a draft model: a
    Hugging Face folder, a .gguf file, or the name of a shipped target.

    With `+ngram` at the end of a folder or name, prompt lookup drafts beside that drafter.
    """
    if name.endswith(SUFFIX) and not Path(name).is_dir():
        learned = find_drafter(name.removesuffix(SUFFIX))
        if learned.folder is None or learned.kind.endswith(SUFFIX):
            raise ForerunError(f"drafter {name!r}: {SUFFIX} goes behind a learned drafter's name")
        name, kind, digest = (
            f"{fact}{SUFFIX}" for fact in (learned.name, learned.kind, learned.digest)
        )
        return DrafterSource(name, kind, learned.folder, digest)
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
    kind = _kind(folder)
    if kind not in DRAFTERS:
        raise ForerunError(
            f"{folder / 'config.json'}: unknown drafter kind {kind!r}: "
            f"this version knows {', '.join(DRAFTERS)}"
        )
    return DrafterSource(folder.name, kind, folder, _digest(folder))


def load_drafter(
    source: DrafterSource, checkpoint: Checkpoint, capacity: int, acceptance: str = "matching"
) -> Drafter:
    """The drafter as a module, its weights in float32 and in the checkpoint's own basis.

    Raises ForerunError where its drafts can't be accepted by the rule `acceptance`.
    """
    drafter = DRAFTERS[source.kind.removesuffix(SUFFIX)](source.folder, checkpoint, capacity)
    drafter = Combined(as_growing(drafter)) if source.kind.endswith(SUFFIX) else drafter
    drafter.accept_by(acceptance)
    return drafter


def vocabulary_matrix(checkpoint: Checkpoint) -> Tensor:
    """The target's vocabulary layer `[V, H]`, tied or not."""
    weights = checkpoint.weights
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def _kind(folder: Path) -> str:
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ForerunError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ForerunError(f"{path}: not a JSON object")
    if config.get("kind"):
        return str(config["kind"])
    # Published folders name no kind, but what only theirs have: Medusa its number of heads.
    if "medusa_num_heads" in config:
        return "medusa"
    if "dflash_config" in config or config.get("speculators_model_type") == "dflash":
        return "dflash"
    return eagle_kind(folder, config) or ("draft" if _is_language_model(config) else "unknown")


def _is_language_model(config: dict[str, Any]) -> bool:
    """Whether this is a model on its own, which drafts as it is: asked after all other kinds."""
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
