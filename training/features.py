"""Which hidden states of a target drafters read, by kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from forerun.training.eagle import feature_layers

DFLASH_FEATURES = 5


def dflash_layers(layers: int) -> tuple[int, ...]:
    """What leaves layers spread evenly from the second to the last but two, as DFlash is published;
    a feature is named by the layer that it enters."""
    first, last = min(1, layers - 1), max(layers - 3, 0)
    steps = DFLASH_FEATURES - 1
    return tuple(
        dict.fromkeys(round(first + i * (last - first) / steps) + 1 for i in range(steps + 1))
    )


FEATURES: dict[str, Callable[[int], tuple[int, ...]]] = {
    **{kind: partial(feature_layers, kind) for kind in ("eagle", "eagle3", "mtp")},
    "dflash": dflash_layers,
}
