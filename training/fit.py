"""The loop that trains all drafters: AdamW along a cosine, and a checkpoint to go on from."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from forerun.errors import ForerunError
from forerun.progress import progress
from forerun.training import ranks
from forerun.training.device import CPU, device_of, moved

CHECKPOINT = "training.pt"
TRIAL = "trial"
"""Where an epoch's drafter is written to be measured."""
B = TypeVar("B")
Worth = Callable[[Path], float]
"""How good the drafter in a folder is on what is held out: tokens a step."""


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
    average: float = 0.0
    """Decay of the running mean of the weights that is kept in their place; 0: there is none."""
    patience: int | None = None
    """Epochs without a better score that end the training, and then the best epoch's weights are
    kept; None: all epochs are gone through, and the last weights kept."""
    start: str | None = None
    """The drafter whose weights, and reduced vocabulary, it begins with; None: as its kind does."""
    seed: int = 0
    save_every: int = 100
    """Steps between two checkpoints."""
    dtype: str = "bfloat16"
    """What the matmuls are computed in; parameters stay in float32."""

    def recorded(self, training: Any) -> dict[str, Any]:
        """What a drafter's folder says of its making, `training` being its kind's own settings;
        where it began by name alone, since a path says nothing elsewhere."""
        name = self.start and Path(self.start).name
        return asdict(training) | asdict(self) | {"start": name}


@dataclass(frozen=True)
class Task(Generic[B]):
    """What is trained: a module, its batches, and the loss of one.

    Batches are made on the CPU. The module is where it is trained, and what it is given is moved
    there.
    """

    module: nn.Module
    steps: int
    """Batches an epoch."""
    epoch: Callable[[torch.Generator], Sequence[Any]]
    """What an epoch's batches are made of, drawn anew."""
    batch: Callable[[Any], B]
    """Makes one batch, of tensors that `moved` finds."""
    loss: Callable[[B], tuple[Tensor, Tensor]]
    """-> the loss to step along, and figures to report, which are averaged over an epoch."""
    facts: str
    """Names the data and the sizes: a checkpoint of other facts is not gone on from."""
    told: Callable[[int, Tensor], str]
    """The line that reports an epoch, from 1 on, with the mean of its figures."""
    save: Callable[[Path, Any], None]
    """Writes a drafter's folder from the module, or from a copy of it."""


@dataclass
class Best:
    """The epoch of the highest score so far."""

    score: float = -math.inf
    epoch: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)


def fit(
    task: Task[Any],
    folder: Path,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    worth: Worth | None = None,
) -> None:
    """Trains `task.module` in place and writes its drafter into `folder`.

    A killed run goes on from its last checkpoint, exactly. `worth` measures each epoch's drafter.
    Under torchrun every process takes its share of an epoch's batches, and steps along the mean of
    all gradients; the first one writes. Raises ForerunError where an epoch has fewer batches than
    there are processes.
    """
    run = _Run(task, folder, settings)
    total = run.steps * settings.epochs
    with progress("training", total) as advance:
        advance(run.step)
        while run.step < total and not run.ended():
            run.advance(run.step / total)
            advance(1)
            epoch, rest = divmod(run.step, run.steps)
            if not rest:
                assert run.figures is not None
                say(task.told(epoch, ranks.mean(run.figures) / run.steps))
                run.judge(epoch, worth, say)
            if run.step % settings.save_every == 0 or run.ended():
                run.save()
    run.keep()
    if not ranks.rank():
        task.save(folder, task.module)
        run.path.unlink(missing_ok=True)


def schedule(done: float, warmup: float) -> float:
    """The share of the highest learning rate after the share `done` of the steps."""
    if done < warmup:
        return (done + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


class _Loss(nn.Module):
    """A task's loss as a module, so that DistributedDataParallel can stand around it."""

    def __init__(self, task: Task[Any]) -> None:
        super().__init__()
        self.module, self.loss = task.module, task.loss

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.loss(batch)


class _Run:
    """A training run at a moment; all of it is in its checkpoint."""

    def __init__(self, task: Task[Any], folder: Path, settings: Settings) -> None:
        self.task, self.settings = task, settings
        self.steps = task.steps // ranks.size()  # an epoch's, of this process
        if not self.steps:
            raise ForerunError(
                f"{ranks.size()} processes and {task.steps} batches: start fewer, or take a "
                "smaller --batch"
            )
        self.path = folder / CHECKPOINT
        folder.mkdir(parents=True, exist_ok=True)
        self.module, self.device = task.module, device_of(task.module)
        self.optimiser = torch.optim.AdamW(
            (weight for weight in self.module.parameters() if weight.requires_grad),
            lr=settings.rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        mean = get_ema_multi_avg_fn(settings.average)  # type: ignore[no-untyped-call]
        self.average = AveragedModel(self.module, multi_avg_fn=mean) if settings.average else None
        self.step = 0
        self.figures: Tensor | None = None
        """The sum over the epoch so far."""
        self.best = Best()
        self.facts = json.dumps([task.facts, asdict(settings), ranks.size()])
        self.load()
        loss = _Loss(task)
        self.loss = DistributedDataParallel(loss) if ranks.size() > 1 else loss
        self.drawn: Sequence[Any] = ()

    def advance(self, done: float) -> None:
        """One update, after the share `done` of them."""
        epoch, place = divmod(self.step, self.steps)
        if place == 0 or not self.drawn:
            draw = torch.Generator().manual_seed(self.settings.seed * 1000 + epoch)
            self.drawn = self.task.epoch(draw)
        if place == 0:
            self.figures = None
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate * schedule(done, self.settings.warmup)
        drawn = self.drawn[place * ranks.size() + ranks.rank()]
        batch = moved(self.task.batch(drawn), self.device)
        found = _step(self.loss, batch, self.optimiser, self.settings)
        if self.average is not None:
            self.average.update_parameters(self.module)
        self.figures = found if self.figures is None else self.figures + found
        self.step += 1

    def judge(self, epoch: int, worth: Worth | None, say: Callable[[str], None]) -> None:
        """Measures what would be kept, and remembers it where no epoch before was better."""
        if worth is None:
            return
        module = self.module if self.average is None else self.average.module
        found = 0.0
        if not ranks.rank():
            trial = self.path.with_name(TRIAL)
            self.task.save(trial, module)
            found = worth(trial)
            shutil.rmtree(trial)
        found = ranks.of_first(found, self.device)
        say(f"epoch {epoch}: held-out tau {found:.3f}")
        if found > self.best.score and self.settings.patience is not None:
            weights = {name: w.to(CPU, copy=True) for name, w in module.state_dict().items()}
            self.best = Best(found, epoch, weights)

    def ended(self) -> bool:
        """Whether the best epoch is too long ago."""
        patience, epoch = self.settings.patience, self.step // self.steps
        return (
            bool(self.best.weights)
            and patience is not None
            and (epoch - self.best.epoch >= patience)
        )

    def keep(self) -> None:
        """Puts the weights that are kept into the module."""
        if self.best.weights:
            self.module.load_state_dict(self.best.weights)
        elif self.average is not None:
            self.module.load_state_dict(self.average.module.state_dict())

    def save(self) -> None:
        """Process 0 writes; the name appears only once the content is complete. Its tensors are
        the CPU's, so that any device can go on from it."""
        figures = None if self.figures is None else ranks.mean(self.figures)
        if ranks.rank():
            return
        part = self.path.with_suffix(".part")
        average = None if self.average is None else self.average.state_dict()
        saved = {
            "facts": self.facts,
            "step": self.step,
            "module": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "average": average,
            "figures": figures,
            "best": asdict(self.best),
        }
        torch.save(moved(saved, CPU), part)
        part.replace(self.path)

    def load(self) -> None:
        """Goes on from the checkpoint, unless it is another run's."""
        if not self.path.exists():
            return
        saved: dict[str, Any] = torch.load(self.path, map_location=CPU, weights_only=True)
        if saved["facts"] != self.facts:
            return
        self.module.load_state_dict(saved["module"])
        self.optimiser.load_state_dict(saved["optimiser"])
        if self.average is not None:
            self.average.load_state_dict(saved["average"])
        self.step, self.figures = int(saved["step"]), moved(saved["figures"], self.device)
        self.best = Best(**saved["best"])


def _step(
    loss_of: nn.Module, batch: Any, optimiser: torch.optim.Optimizer, settings: Settings
) -> Tensor:
    """One update; returns the batch's figures."""
    dtype, kind = getattr(torch, settings.dtype), device_of(loss_of).type
    mixed = nullcontext() if dtype == torch.float32 else torch.autocast(kind, dtype)
    optimiser.zero_grad(set_to_none=True)
    with mixed:
        loss, figures = loss_of(batch)
    loss.backward()
    nn.utils.clip_grad_norm_(loss_of.parameters(), settings.clip)
    optimiser.step()
    detached: Tensor = figures.detach()
    return detached
