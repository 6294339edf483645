"""Medusa heads from a target's answers (Cai et al., 2024, section 2.2.1: a frozen target)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafters import vocabulary_matrix
from forerun.models.medusa import MedusaConfig
from forerun.models.medusa_folder import save_medusa
from forerun.progress import progress
from forerun.training.data import Answers, Data
from forerun.training.evaluate import in_vocabulary, measure

CHECKPOINT = "training.pt"


@dataclass(frozen=True)
class MedusaTraining:
    """Shape of the heads and how they are trained."""

    heads: int = 4
    layers: int = 3
    epochs: int = 4
    batch: int = 1024
    """Answer positions a step."""
    rate: float = 1e-3
    """AdamW's highest learning rate; it falls to zero along a cosine."""
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    draft_vocabulary: int = 8192
    """How many of the commonest tokens the heads can propose, and the loss runs over.

    Measured: twice as many cost twice the time and propose worse, for rare tokens stay untrained.
    """
    top_k: int = 10
    seed: int = 0
    save_every: int = 100
    """Steps between two checkpoints."""
    dtype: str = "bfloat16"
    """What the matmuls are computed in; parameters stay in float32."""


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
    report: Callable[[str], None] = lambda line: None,
) -> MedusaConfig:
    """Trains heads on `data.train`, measures them on `data.held_out`, writes `folder`.

    A killed run goes on from its last checkpoint. Raises ForerunError for data of another target.
    """
    if data.target_digest != checkpoint.digest:
        raise ForerunError(f"the data are not {checkpoint.name}'s answers: synthesize them again")
    vocabulary = vocabulary_matrix(checkpoint)
    ids = commonest(data.frequencies, training.draft_vocabulary)
    hidden = checkpoint.config.hidden_size
    heads = Heads(training.heads, training.layers, hidden)
    fit(heads, data.train, vocabulary, ids, folder, training, report)
    # What is measured is what is shipped: rounded to float16.
    heads.load_state_dict({k: v.half().float() for k, v in heads.state_dict().items()})
    result = measure(heads, data.held_out, vocabulary, ids, training.top_k)
    for line in result.lines:
        report(line)
    config = MedusaConfig(
        training.heads, training.layers, hidden, training.top_k, result.table("mean")
    )
    facts = {
        "target": checkpoint.name,
        "target_digest": checkpoint.digest,
        "training": asdict(training),
        "train_tokens": len(data.train.tokens),
        "held_out": result.facts,
    }
    tensors = {name: tensor.to(torch.float16) for name, tensor in heads.state_dict().items()}
    tensors["ids"] = ids.to(torch.int32)
    save_medusa(folder, config, tensors, facts)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return config


def commonest(frequencies: Tensor, count: int) -> Tensor:
    """The `count` most frequent token ids, `[V']`; of equals the lowest, which is the shortest."""
    return frequencies.argsort(descending=True, stable=True)[:count]


def fit(
    heads: Heads,
    answers: Answers,
    vocabulary: Tensor,
    ids: Tensor,
    folder: Path,
    training: MedusaTraining,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Cross-entropy of every head against the token that followed, AdamW, cosine schedule.

    The heads share no parameter and AdamW ignores a loss's scale, so the heads' losses are summed
    without the weights that Medusa gives them.
    """
    dtype = getattr(torch, training.dtype)
    output = vocabulary[ids].to(dtype)  # [V', H]
    labels = in_vocabulary(answers.following(training.heads), ids, len(vocabulary))
    usable = (labels >= 0).any(1).nonzero()[:, 0]
    steps_an_epoch = max(len(usable) // training.batch, 1)
    total = steps_an_epoch * training.epochs
    optimiser = torch.optim.AdamW(
        heads.parameters(), lr=training.rate, weight_decay=training.weight_decay
    )
    state = folder / CHECKPOINT
    folder.mkdir(parents=True, exist_ok=True)
    first = _resume(state, heads, optimiser, training, len(usable))
    losses = torch.zeros(training.heads)
    order, shuffled = torch.empty(0, dtype=torch.int64), -1
    with progress("training", total) as advance:
        advance(first)
        for step in range(first, total):
            epoch, place = divmod(step, steps_an_epoch)
            if epoch != shuffled:
                draw = torch.Generator().manual_seed(training.seed * 1000 + epoch)
                order, shuffled = usable[torch.randperm(len(usable), generator=draw)], epoch
            rows = order[place * training.batch : (place + 1) * training.batch]
            for group in optimiser.param_groups:
                group["lr"] = training.rate * schedule(step / total, training.warmup)
            losses += _step(heads, optimiser, answers.states[rows], labels[rows], output, training)
            advance()
            if (step + 1) % training.save_every == 0:
                _save(state, heads, optimiser, training, len(usable), step + 1)
            if place + 1 == steps_an_epoch:
                mean = " ".join(f"{loss / steps_an_epoch:.3f}" for loss in losses.tolist())
                report(f"epoch {epoch + 1}: loss by head {mean}")
                losses.zero_()


def schedule(done: float, warmup: float) -> float:
    """The share of the highest learning rate after the share `done` of the steps."""
    if done < warmup:
        return (done + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def _step(
    heads: Heads,
    optimiser: torch.optim.Optimizer,
    states: Tensor,
    labels: Tensor,
    output: Tensor,
    training: MedusaTraining,
) -> Tensor:
    """One update; returns the loss of each head. Heads go one by one, to save memory.

    Cross-entropy's gradient, probabilities less the truth, is written out: autograd would keep
    several float32 copies of `[n, V']` logits, which took twice the time.
    """
    optimiser.zero_grad(set_to_none=True)
    losses = []
    with torch.autocast("cpu", output.dtype, enabled=output.dtype != torch.float32):
        for head, x in enumerate(heads(states.to(torch.float32))):
            known = (labels[:, head] >= 0).nonzero()[:, 0]
            truth = labels[known, head][:, None]  # [n, 1]
            with torch.no_grad():
                error = (x[known].to(output.dtype) @ output.T).softmax(-1)  # [n, V']
                right = error.gather(1, truth)
                error.scatter_(1, truth, right - 1)
                slope = torch.zeros_like(x)
                slope[known] = (error @ output).to(x.dtype) / len(known)
            x.backward(slope)
            losses.append(-right.to(torch.float32).clamp(min=1e-9).log().mean())
    nn.utils.clip_grad_norm_(heads.parameters(), training.clip)
    optimiser.step()
    return torch.stack(losses)


def _save(
    path: Path,
    heads: Heads,
    optimiser: torch.optim.Optimizer,
    training: MedusaTraining,
    rows: int,
    step: int,
) -> None:
    part = path.with_suffix(".part")
    facts = json.dumps([asdict(training), rows])
    torch.save(
        {
            "facts": facts,
            "step": step,
            "heads": heads.state_dict(),
            "optimiser": optimiser.state_dict(),
        },
        part,
    )
    part.replace(path)


def _resume(
    path: Path,
    heads: Heads,
    optimiser: torch.optim.Optimizer,
    training: MedusaTraining,
    rows: int,
) -> int:
    """Loads the checkpoint at `path`, if it belongs to this very run; returns its step."""
    if not path.exists():
        return 0
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    if saved["facts"] != json.dumps([asdict(training), rows]):
        return 0  # other settings or more data: begin anew
    heads.load_state_dict(saved["heads"])
    optimiser.load_state_dict(saved["optimiser"])
    return int(saved["step"])
