"""The loop that trains all drafters: AdamW along a cosine, and a checkpoint to go on from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from forerun.progress import progress

CHECKPOINT = "training.pt"
B = TypeVar("B")


@dataclass(frozen=True)
class Settings:
    """How a drafter is trained, whatever its kind."""

    epochs: int = 4
    rate: float = 1e-3
    """AdamW's highest learning rate; it falls to zero along a cosine."""
    warmup: float = 0.03
    """Share of the steps in which it rises."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    seed: int = 0
    save_every: int = 100
    """Steps between two checkpoints."""
    dtype: str = "bfloat16"
    """What the matmuls are computed in; parameters stay in float32."""


@dataclass(frozen=True)
class Task(Generic[B]):
    """What is trained: a module, its batches, and the loss of one."""

    module: nn.Module
    steps: int
    """Batches an epoch."""
    epoch: Callable[[torch.Generator], Sequence[B]]
    """An epoch's batches, drawn anew."""
    loss: Callable[[B], tuple[Tensor, Tensor]]
    """-> the loss to step along, and figures to report, which are averaged over an epoch."""
    facts: str
    """Names the data and the sizes: a checkpoint of other facts is not gone on from."""


def fit(
    task: Task[Any],
    folder: Path,
    settings: Settings,
    report: Callable[[int, Tensor], None] = lambda epoch, figures: None,
) -> None:
    """Trains `task.module` in place; a killed run goes on from its last checkpoint, exactly.

    `report` gets the epoch, from 1 on, and the mean of its figures.
    """
    optimiser = torch.optim.AdamW(
        (weight for weight in task.module.parameters() if weight.requires_grad),
        lr=settings.rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )
    folder.mkdir(parents=True, exist_ok=True)
    state = _State(folder / CHECKPOINT, json.dumps([task.facts, asdict(settings)]))
    first, figures = state.load(task.module, optimiser)
    total = task.steps * settings.epochs
    batches: Sequence[Any] = ()
    with progress("training", total) as advance:
        advance(first)
        for step in range(first, total):
            epoch, place = divmod(step, task.steps)
            if place == 0 or not batches:
                draw = torch.Generator().manual_seed(settings.seed * 1000 + epoch)
                batches = task.epoch(draw)
            if place == 0:
                figures = None
            for group in optimiser.param_groups:
                group["lr"] = settings.rate * schedule(step / total, settings.warmup)
            found = _step(task, batches[place], optimiser, settings)
            figures = found if figures is None else figures + found
            advance(1)
            if place + 1 == task.steps:
                report(epoch + 1, figures / task.steps)
            if (step + 1) % settings.save_every == 0:
                state.save(task.module, optimiser, step + 1, figures)


def finished(folder: Path) -> None:
    """Lets go of the checkpoint, once the drafter itself is written."""
    (folder / CHECKPOINT).unlink(missing_ok=True)


def schedule(done: float, warmup: float) -> float:
    """The share of the highest learning rate after the share `done` of the steps."""
    if done < warmup:
        return (done + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _step(task: Task[B], batch: B, optimiser: torch.optim.Optimizer, settings: Settings) -> Tensor:
    """One update; returns the batch's figures."""
    dtype = getattr(torch, settings.dtype)
    optimiser.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss, figures = task.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(task.module.parameters(), settings.clip)
    optimiser.step()
    return figures.detach()


@dataclass(frozen=True)
class _State:
    """What a run needs to go on, in a file that only ever holds whole steps."""

    path: Path
    facts: str

    def save(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, step: int, figures: Tensor | None
    ) -> None:
        part = self.path.with_suffix(".part")
        torch.save(
            {
                "facts": self.facts,
                "step": step,
                "module": module.state_dict(),
                "optimiser": optimiser.state_dict(),
                "figures": figures,
            },
            part,
        )
        part.replace(self.path)

    def load(
        self, module: nn.Module, optimiser: torch.optim.Optimizer
    ) -> tuple[int, Tensor | None]:
        """The step to go on with and the epoch's figures so far; 0 where another run was saved."""
        if not self.path.exists():
            return 0, None
        saved: dict[str, Any] = torch.load(self.path, weights_only=True)
        if saved["facts"] != self.facts:
            return 0, None
        module.load_state_dict(saved["module"])
        optimiser.load_state_dict(saved["optimiser"])
        return int(saved["step"]), saved["figures"]
