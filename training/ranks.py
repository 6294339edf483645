"""Processes that train one drafter together: torchrun starts them, each takes its own batches.

They talk by NCCL where they compute on GPUs, one each, else by gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from forerun.training.device import CPU

PATIENCE = timedelta(days=2)
"""How long processes wait for each other: while the first one reads features or measures, which
may take longer than the minutes that torch waits by default."""


@contextmanager
def joined(device: torch.device = CPU) -> Iterator[None]:
    """The group of all processes that torchrun started, while the context lasts; this one computes
    on `device`."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL's barrier takes the current one
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """This process's number; the one of number 0 reads first, reports and writes."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def first_then_others() -> Iterator[None]:
    """Process 0 goes through the context before the others: they find what it has written."""
    if rank():
        dist.barrier()
    yield
    if rank() == 0 and size() > 1:
        dist.barrier()


def mean(x: Tensor) -> Tensor:
    """The mean over all processes, in each of them."""
    if size() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total / size()


def of_first(value: float, device: torch.device) -> float:
    """Process 0's value, in each of them; it travels by way of `device`."""
    if size() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return float(shared)
