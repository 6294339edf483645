"""Medusa heads from a target's answers (Cai et al., 2024, section 2.2.1: a frozen target)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafters import vocabulary_matrix
from forerun.models.linear import Linear
from forerun.models.medusa import Medusa, MedusaConfig
from forerun.models.medusa_folder import save_medusa
from forerun.training.begin import begin, take_over
from forerun.training.data import Answers, Data, commonest
from forerun.training.device import CPU, device_of
from forerun.training.evaluate import Measured, in_vocabulary, measure
from forerun.training.fit import Settings, Task, Worth, fit
from forerun.training.shards import check_target


@dataclass(frozen=True)
class MedusaTraining:
    """Shape of the heads, and what their loss runs over."""

    heads: int = 4
    layers: int = 3
    batch: int = 1024
    """Answer positions a step."""
    draft_vocabulary: int = 8192
    """How many of the commonest tokens the heads can propose, and the loss runs over.

    Measured: twice as many cost twice the time and propose worse, for rare tokens stay untrained.
    """
    top_k: int = 10


class Residual(nn.Module):
    """`x + silu(W x + b)`, zero at first, so that it passes on what it gets."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class Heads(nn.Module):
    """Residual blocks, `layers` a head; its keys are Medusa's published names."""

    def __init__(self, heads: int, layers: int, hidden: int) -> None:
        super().__init__()
        for head in range(heads):
            blocks = (Residual(hidden) for _ in range(layers))
            self.add_module(str(head), nn.Sequential(*blocks))

    def forward(self, states: Tensor) -> Iterator[Tensor]:
        """`[n, H]` -> each head's state `[n, H]` before the vocabulary layer."""
        for head in self.children():
            yield head(states)


def train_medusa(
    checkpoint: Checkpoint,
    data: Data,
    folder: Path,
    training: MedusaTraining,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    worth: Worth | None = None,
    device: torch.device = CPU,
) -> MedusaConfig:
    """Trains heads on `data.train`, measures them on `data.held_out`, writes `folder`.

    A killed run goes on from its last checkpoint. Raises ForerunError for data of another target.
    """
    check_target(data.target_digest, checkpoint)
    vocabulary = vocabulary_matrix(checkpoint)
    ids = commonest(data.frequencies, training.draft_vocabulary)
    hidden = checkpoint.config.hidden_size
    heads = Heads(training.heads, training.layers, hidden)
    if settings.start:
        begun = begin(settings.start, "medusa", checkpoint)
        assert isinstance(begun, Medusa)
        take_over(heads, apart(begun), settings.start)
        ids = ids if begun.ids is None else begun.ids
    training = replace(training, draft_vocabulary=len(ids))
    written: list[tuple[MedusaConfig, Measured]] = []

    def save(where: Path, trained: Heads) -> None:
        written.append(_write(where, checkpoint, data, trained, ids, training, settings))

    task = _task(heads.to(device), data.train, vocabulary, ids, training, settings, save)
    fit(task, folder, settings, say, worth)
    config, result = written[-1]
    for line in result.lines:
        say(line)
    return config


def apart(medusa: Medusa) -> dict[str, Tensor]:
    """The residual blocks' weights by the names that `Heads` has.

    In a drafter those of all heads lie side by side.
    """
    if len(medusa.heads) > 1:
        raise ForerunError(
            "--start: those heads have vocabulary layers of their own; ours share one"
        )
    size, found = medusa.config.hidden_size, {}
    for layer, block in enumerate(medusa.blocks):
        assert isinstance(block, Linear) and block.bias is not None
        parts = zip(torch.split(block.weight, size, 1), torch.split(block.bias, size), strict=True)
        for head, (weight, bias) in enumerate(parts):
            found[f"{head}.{layer}.linear.weight"] = weight.T
            found[f"{head}.{layer}.linear.bias"] = bias
    return found


def _write(
    folder: Path,
    checkpoint: Checkpoint,
    data: Data,
    trained: Heads,
    ids: Tensor,
    training: MedusaTraining,
    settings: Settings,
) -> tuple[MedusaConfig, Measured]:
    """The drafter's folder, in float16, with what its heads get right on held-out answers."""
    heads = deepcopy(trained)
    # What is measured is what is shipped: rounded to float16.
    heads.load_state_dict({k: v.half().float() for k, v in heads.state_dict().items()})
    vocabulary = vocabulary_matrix(checkpoint)
    result = measure(heads, data.held_out, vocabulary, ids, training.top_k)
    hidden = checkpoint.config.hidden_size
    config = MedusaConfig(
        training.heads, training.layers, hidden, training.top_k, result.table("mean")
    )
    facts = {
        "target": checkpoint.name,
        "target_digest": checkpoint.digest,
        "training": settings.recorded(training),
        "train_tokens": len(data.train.tokens),
        "held_out": result.facts,
    }
    tensors = {name: part.to(CPU, torch.float16) for name, part in heads.state_dict().items()}
    tensors["ids"] = ids.to(torch.int32)
    save_medusa(folder, config, tensors, facts)
    return config, result


@dataclass(frozen=True)
class Positions:
    """n places in answers, and what each head is to say there."""

    states: Tensor  # [n, H]
    known: tuple[Tensor, ...]  # a head each, [m] int64: the places that it has something to say at
    labels: tuple[Tensor, ...]  # a head each, [m] int64: the column of the true token


def _task(
    heads: Heads,
    answers: Answers,
    vocabulary: Tensor,
    ids: Tensor,
    training: MedusaTraining,
    settings: Settings,
    save: Callable[[Path, Heads], None],
) -> Task[Positions]:
    """Cross-entropy of every head against the token that followed.

    The heads share no parameter and AdamW ignores a loss's scale, so the heads' losses are summed
    without the weights that Medusa gives them.
    """
    output = vocabulary[ids].to(device_of(heads), getattr(torch, settings.dtype))  # [V', H]
    labels = in_vocabulary(answers.following(training.heads), ids, len(vocabulary))
    usable = (labels >= 0).any(1).nonzero()[:, 0]

    def epoch(draw: torch.Generator) -> list[Tensor]:
        order = usable[torch.randperm(len(usable), generator=draw)]
        return [*torch.split(order, training.batch)][: max(len(usable) // training.batch, 1)]

    def batch(rows: Tensor) -> Positions:
        columns = labels[rows].T  # [heads, n]
        known = tuple((column >= 0).nonzero()[:, 0] for column in columns)
        parts = zip(columns, known, strict=True)
        return Positions(answers.states[rows], known, tuple(c[places] for c, places in parts))

    def loss(positions: Positions) -> tuple[Tensor, Tensor]:
        states, found = heads(positions.states.to(torch.float32)), []
        # One by one, to save memory.
        for x, known, label in zip(states, positions.known, positions.labels, strict=True):
            mean = VocabularyLoss.apply(x[known], output, label)  # type: ignore[no-untyped-call]
            found.append(mean)
        figures = torch.stack(found)
        return figures.sum(), figures

    def told(number: int, figures: Tensor) -> str:
        return f"epoch {number}: loss by head {' '.join(f'{x:.3f}' for x in figures.tolist())}"

    steps = max(len(usable) // training.batch, 1)
    facts = json.dumps([asdict(training), len(usable)])
    return Task(heads, steps, epoch, batch, loss, facts, told, save)


class VocabularyLoss(torch.autograd.Function):
    """Mean cross-entropy of `x` `[n, H]` through the fixed matrix `output` `[V', H]`.

    Its gradient, probabilities less the truth, is written out: autograd would keep several float32
    copies of `[n, V']` logits, which took twice the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, truth: Tensor) -> Tensor:
        """`truth` `[n]` are columns."""
        error = (x.to(output.dtype) @ output.T).softmax(-1)  # [n, V']
        right = error.gather(1, truth[:, None])
        error.scatter_(1, truth[:, None], right - 1)
        ctx.save_for_backward((error @ output).to(x.dtype) / max(len(truth), 1))
        return -right.to(torch.float32).clamp(min=1e-9).log().sum() / max(len(truth), 1)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of `x` alone."""
        (slope,) = ctx.saved_tensors
        return slope * slopes[0], None, None
