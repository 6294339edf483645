"""The drafters that come with the package: small, documented, and for the target they name."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")

from forerun.models.checkpoint import load_checkpoint  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter  # noqa: E402

SHIPPED = Path(str(resources.files("forerun.models"))) / "shipped"
KINDS = {"chat": "medusa", "tool-calls": "eagle3"}


def test_all_shipped_drafters_are_known_here() -> None:
    assert {path.name for path in SHIPPED.iterdir()} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_shipped_drafter_is_complete(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder of that name would win
    source = find_drafter(name)
    assert source.folder == SHIPPED / name
    assert source.kind == KINDS[name]
    checkpoint = load_checkpoint("smollm2")
    config = json.loads((SHIPPED / name / "config.json").read_text())
    assert (config["target"], config["target_digest"]) == ("smollm2", checkpoint.digest)
    assert "/" not in (config["training"].get("start") or "")
    assert sum(path.stat().st_size for path in (SHIPPED / name).iterdir()) < 16 * 2**20
    card = (SHIPPED / name / "MODEL_CARD.md").read_text()
    assert all(word in card for word in ("## Data", "## Recipe", "forerun train", "## Licences"))
    for with_lookup in (name, f"{name}+ngram"):
        drafter = load_drafter(find_drafter(with_lookup), checkpoint, 64)
        drafter.trim([6])
        assert drafter.max_depth() >= 3
