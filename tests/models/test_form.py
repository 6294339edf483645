"""Drafters of one form differ in nothing but the content of their weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.models.combined import Combined, MatchAccuracy
from forerun.models.config import RopeConfig
from forerun.models.dflash import DFlash, DFlashConfig, dflash
from forerun.models.dflash_folder import dflash_shapes
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.form import difference, form
from forerun.models.growing import as_growing

LAYER = DraftLayerConfig(32, 24, 4, 2, 8, 1e-5, 192, RopeConfig(5000.0, 8))


def random_dflash(seed: int, **changes) -> DFlash:
    config = DFlashConfig(LAYER, 1, (0, 1), 4, 3, **changes)
    draw = torch.Generator().manual_seed(seed)
    shapes = dict(dflash_shapes(config))
    weights = {name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()}
    return dflash(config, weights, 192)


@pytest.fixture
def make(make_target, make_medusa, make_eagle, make_draft_model):
    """`make(kind, seed, **changes)`: a random drafter."""
    target = make_target()

    def drafter(kind: str, seed: int = 1, **changes):
        if kind.startswith("medusa"):
            made = make_medusa(target, seed=seed, **changes)
        elif kind == "dflash":
            made = random_dflash(seed, **changes)
        elif kind == "draft":
            made = make_draft_model(seed=seed, **changes)
        else:
            made = make_eagle(target, kind.removesuffix("+ngram"), seed=seed, **changes)
        if kind.endswith("+ngram"):
            return Combined(as_growing(made))
        return made

    return drafter


@pytest.mark.parametrize(
    "kind", ["medusa", "medusa+ngram", "eagle3", "eagle+ngram", "mtp", "dflash", "draft"]
)
def test_other_weights_are_of_the_same_form(make, kind):
    first, second = make(kind), make(kind, seed=2)
    weights, others = first.state_dict(), second.state_dict()
    assert any(not weights[name].equal(others[name]) for name in weights)
    assert difference(form(first), form(second)) is None


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("medusa", {"top_k": 1}, "config.top_k is 1, not 3"),
        ("medusa", {"heads": 1}, "config.heads is 1, not 3"),
        ("eagle3", {"vocabulary": 30}, "ids is int64 [30], not int64 [40]"),
        ("eagle3", {"norm_output": True}, "config.norm_output is True, not False"),
        ("eagle3", {"feature_layers": (0, 1, 1)}, "feature_layers"),
        ("eagle", {"layer": replace(LAYER, rms_norm_eps=1e-6)}, "rms_norm_eps is 1e-06, not 1e-05"),
        ("eagle", {"depth": 2}, "config.depth is 2, not 3"),
        ("dflash", {"tree": False}, "DFlash, not DFlashTree"),
        ("dflash", {"window": 9, "sliding_layers": (True,)}, "config.window is 9, not None"),
        ("draft", {"gamma": 2}, "gamma is 2, not 4"),
        ("draft", {"num_layers": 3}, "num_layers is 3, not 2"),
        ("draft", {"acceptance": "rejection"}, "acceptance"),
    ],
)
def test_what_the_graph_holds_as_a_constant_is_part_of_the_form(make, kind, changes, named):
    found = difference(form(make(kind, seed=2, **changes)), form(make(kind)))
    assert named in found


def test_what_only_weights_come_from_is_not(make, make_target, make_eagle, make_medusa):
    turned = replace(LAYER, rope=RopeConfig(10_000.0, 8), max_positions=100)
    assert difference(form(make("eagle", layer=turned)), form(make("eagle"))) is None
    halved = replace(LAYER, rope=RopeConfig(5000.0, 4))
    assert "rotary.dim is 4, not 0" in difference(
        form(make("eagle", layer=halved)), form(make("eagle"))
    )
    heads = make_medusa(make_target())
    accurate = Combined(as_growing(heads), accuracy=MatchAccuracy((0.1,) * 8))
    assert difference(form(accurate), form(Combined(as_growing(heads)))) is None
