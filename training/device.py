"""Where training and synthesis compute: the device asked for, and how tensors get there."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError

CPU = torch.device("cpu")
T = TypeVar("T")


def find_device(name: str) -> torch.device:
    """`auto` (a GPU where there is one), `cpu` or `cuda`; of several GPUs the one of this process
    under torchrun, else the first.

    Raises ForerunError where torch finds none, or torchrun has started more processes than that.
    """
    found = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not found):
        return CPU
    if not found:
        raise ForerunError(
            "--device cuda: torch finds no GPU here: choose --device cpu, or install a torch "
            "built for CUDA where there is one"
        )
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise ForerunError(
            f"torchrun has started {place + 1} processes or more here, one for a GPU, and there "
            f"are {count}: start no more than that, or choose --device cpu"
        )
    return torch.device("cuda", place)


def device_of(module: nn.Module) -> torch.device:
    """Where the module's parameters are."""
    return next(module.parameters()).device


def moved(value: T, device: torch.device) -> T:
    """`value` with every tensor in it on `device`: dataclasses, dicts, lists and tuples are gone
    through."""
    if isinstance(value, Tensor):
        return value.to(device)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **parts)
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}  # type: ignore[return-value]
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    return value
