"""Processes that train one drafter together: torchrun starts them, each takes its own batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def joined() -> Iterator[None]:
    """The group of all processes that torchrun started, while the context lasts."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
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


def device() -> torch.device:
    """Where this process computes: a GPU of its own where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


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


def of_first(value: float) -> float:
    """Process 0's value, in each of them."""
    if size() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64, device=device())
    dist.broadcast(shared, 0)
    return float(shared)
