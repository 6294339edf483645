"""Training that goes on from a finished drafter, as to fit a general one to a task."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafter import Drafter
from forerun.models.drafters import find_drafter, load_drafter


def begin(name: str, kind: str, checkpoint: Checkpoint) -> Drafter:
    """The drafter `name`, which must be of that kind; raises ForerunError where it is not."""
    source = find_drafter(name)
    if source.kind != kind:
        raise ForerunError(f"--start {name}: a drafter of kind {source.kind}, not {kind}")
    return load_drafter(source, checkpoint, 64)  # the room in its caches is no weight


@torch.no_grad()
def take_over(module: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    """Puts the drafter `name`'s `weights`, by the names of `module`'s parameters, in their place.

    Raises ForerunError where one is missing, of another shape, or left over.
    """
    for place, ours in module.named_parameters():
        theirs = weights.get(place)
        if theirs is None or theirs.shape != ours.shape:
            found = "nothing" if theirs is None else f"{[*theirs.shape]}"
            raise ForerunError(
                f"--start {name}: {place} is to be {[*ours.shape]}, and there it is {found}: ask "
                "for the sizes that it was trained with (its config.json has them)"
            )
        ours.copy_(theirs)
    for place in sorted(weights.keys() - {place for place, _ in module.named_parameters()}):
        raise ForerunError(
            f"--start {name}: it has {place}, for which there is no place: ask for the sizes that "
            "it was trained with (its config.json has them)"
        )


def check_alike(theirs: Any, ours: Any, name: str, free: Collection[str] = ()) -> None:
    """Raises ForerunError where two configurations differ but in the fields `free`: weights of the
    same shapes would then mean something else."""
    for field in fields(ours):
        if field.name in free:
            continue
        found, wanted = getattr(theirs, field.name), getattr(ours, field.name)
        if is_dataclass(wanted):
            check_alike(found, wanted, name, free)
        elif found != wanted:
            raise ForerunError(
                f"--start {name}: its {field.name} is {found}, and {wanted} is asked for: ask for "
                "what it was trained with (its config.json has it)"
            )
