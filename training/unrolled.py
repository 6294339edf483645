"""Training of drafters of one layer (EAGLE-1/2, EAGLE-3, MTP), unrolled as they are used.

A row of the context pairs a token's feature with the token after it. Unrolled step j continues from
the drafter's own output of step j - 1 and the true token, and sees of the rows before only what
drafting would: the context up to where it branched off, and its own earlier steps. That is
EAGLE-3's training-time test (arXiv:2503.01840, section 3.2) and FastMTP's recursion
(arXiv:2509.18362). The loss of step j is the cross-entropy against the target's own distribution
over the drafter's vocabulary, weighed by a decay to the power of j.

What is trained are the very modules that draft (`forerun.models.eagle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_layer import DraftLayerConfig, Rotary, Seen
from forerun.models.drafter import Drafter, Vocabulary
from forerun.models.drafters import vocabulary_matrix
from forerun.models.eagle import Eagle
from forerun.training.texts import Text

D = TypeVar("D", bound=Drafter)


class TrainableRotary(Rotary):
    """The same rotation in plain torch, which autograd knows."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        places = positions.clamp(min=0, max=self.cos.shape[0] - 1)
        cos, sin = self.cos[places][:, None].to(x.dtype), self.sin[places][:, None].to(x.dtype)
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class TrainableNorm(nn.RMSNorm):
    """The same norm computed in its weight's dtype whatever autocast makes of its input: torch has
    no fused kernel for two dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)

    @classmethod
    def of(cls, norm: nn.RMSNorm) -> TrainableNorm:
        """In place of `norm`, with its very weight."""
        made = cls(norm.normalized_shape, eps=norm.eps)
        made.weight = norm.weight
        return made


def trainable(drafter: D, layer: DraftLayerConfig, capacity: int) -> D:
    """`drafter` with gradients everywhere."""
    rotary = TrainableRotary(layer, capacity)
    for module in [*drafter.modules()]:
        if isinstance(getattr(module, "rotary", None), Rotary):
            module.rotary = rotary
        for name, part in module.named_children():
            if isinstance(part, nn.RMSNorm):
                setattr(module, name, TrainableNorm.of(part))
    return drafter.requires_grad_(True).train()


class Columns(nn.Module):
    """The target's two ends, the vocabulary layer cut to the columns `ids`."""

    embed: Tensor
    output: Tensor

    def __init__(self, embedding: Tensor, matrix: Tensor, ids: Tensor) -> None:
        """`embedding` and `matrix` `[V, H]`."""
        super().__init__()
        self.register_buffer("embed", embedding)
        self.register_buffer("output", matrix[ids].T.contiguous())

    @classmethod
    def of(cls, checkpoint: Checkpoint, ids: Tensor | None = None) -> Columns:
        """The ends of `checkpoint`; None: all columns."""
        matrix = vocabulary_matrix(checkpoint)
        ids = torch.arange(len(matrix)) if ids is None else ids
        return cls(checkpoint.weights["model.embed_tokens.weight"], matrix, ids)

    def embedding(self, tokens: Tensor) -> Tensor:
        """Tokens `[...]` -> `[..., H]`."""
        return self.embed[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., H]` -> `[..., V']`."""
        return hidden @ self.output


@dataclass(frozen=True)
class Batch:
    """B texts, padded. Query row r stands at context row `prompt - 1 + r`, from where the token
    that follows the r-th answer token is drafted first."""

    tokens: Tensor  # [B, n + unroll] int64
    features: Tensor  # [B, n, F]
    places: Tensor  # [B, m] int64: the context rows that are queries
    states: Tensor  # [B, m + 1 + unroll, H]: what chose answer token 0, 1, ...
    known: Tensor  # [B, m + 1 + unroll] bool: answer tokens that are there
    rows: tuple[Tensor, ...]
    """For each unrolled step `[2, u]` int64: text and query row of what the loss runs over."""
    labels: tuple[Tensor, ...]
    """For each unrolled step `[u]` int64: the true token's place among the drafter's."""


def batch_of(texts: Sequence[Text], unroll: int, columns: Tensor) -> Batch:
    """Pads `texts`, each with an answer of two tokens or more. `columns` `[V]` are the tokens'
    places among the drafter's, or -1.

    All that depends on the data's values is settled here: a GPU would wait for the host.
    """
    longest = max(len(text.tokens) for text in texts)
    rows = max(len(text.states) for text in texts) - 1
    size = len(texts)
    tokens = torch.zeros(size, longest + unroll, dtype=torch.int64)
    features = texts[0].features.new_zeros(size, longest, texts[0].features.shape[1])
    states = texts[0].states.new_zeros(size, rows + 1 + unroll, texts[0].states.shape[1])
    known = torch.zeros(size, rows + 1 + unroll, dtype=torch.bool)
    places = torch.zeros(size, rows, dtype=torch.int64)
    for row, text in enumerate(texts):
        n, answer = len(text.tokens), len(text.states)
        tokens[row, :n], features[row, :n] = text.tokens, text.features
        states[row, :answer], known[row, :answer] = text.states, True
        places[row] = (text.prompt - 1 + torch.arange(rows)).clamp(max=n - 1)
    chosen, labels = [], []
    for step in range(unroll):
        ahead = (places + step + 2).clamp(max=tokens.shape[1] - 1)
        label = columns[tokens.gather(1, ahead)]  # [B, m]
        usable = known[:, step + 1 : step + 1 + rows] & (label >= 0)
        chosen.append(usable.nonzero().T)
        labels.append(label[usable])
    return Batch(tokens, features, places, states, known, tuple(chosen), tuple(labels))


def unroll(drafter: Eagle, batch: Batch, vocabulary: Vocabulary) -> Iterator[Tensor]:
    """The logits `[B, m, V']` of the unrolled steps one after the other; step j drafts the token at
    `place + 2 + j`."""
    n, rows, device = batch.features.shape[1], batch.places.shape[1], batch.places.device
    everywhere = torch.arange(n, device=device).expand(len(batch.tokens), -1)
    embedded = vocabulary.embedding(batch.tokens[:, 1 : n + 1])
    residual, x = drafter.enter(embedded, drafter.fuse(batch.features.to(embedded.dtype)))
    seen = [
        Seen(
            *drafter.attention.keys_values(x, everywhere),
            everywhere[:, None] <= batch.places[..., None],
        )
    ]
    wide = batch.places[..., None]
    residual = residual.gather(1, wide.expand(-1, -1, residual.shape[2]))
    x = x.gather(1, wide.expand(-1, -1, x.shape[2]))
    features = x
    itself = torch.eye(rows, dtype=torch.bool, device=device).expand(len(batch.tokens), -1, -1)
    for step in range(len(batch.rows)):
        positions = batch.places + step
        if step:
            tokens = batch.tokens.gather(1, positions + 1)
            residual, x = drafter.enter(vocabulary.embedding(tokens), features)
            seen.append(Seen(*drafter.attention.keys_values(x, positions), itself))
        x = residual + drafter.attention(x, positions, seen)
        x = x + drafter.mlp(drafter.mlp_norm(x))
        logits, features = drafter.leave(x, vocabulary)
        yield logits


def losses(drafter: Eagle, batch: Batch, vocabulary: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of each step `[steps]`; how many rows had all drafts right up to it, and how
    many there were `[steps]`."""
    found, right, counts = [], [], []
    streak: Tensor | None = None
    with torch.no_grad():
        wanted = vocabulary.logits(batch.states.to(vocabulary.output.dtype))
        wanted = wanted.to(torch.float32).softmax(-1)  # [B, m + 1 + unroll, V']
    parts = zip(unroll(drafter, batch, vocabulary), batch.rows, batch.labels, strict=True)
    for step, (said, (text, row), label) in enumerate(parts):
        logits = said[text, row].to(torch.float32)  # [u, V']
        known = batch.known[:, step + 1 : step + 1 + said.shape[1]]  # [B, m]
        with torch.no_grad():
            hit = torch.zeros_like(known)
            hit[text, row] = logits.argmax(-1) == label
            streak = hit if streak is None else streak & hit
            right.append((streak & known).sum())
            counts.append(known.sum())
        truth = wanted[text, row + step + 1]
        # A batch of short answers may have no row left that goes on so far.
        found.append(-(truth * logits.log_softmax(-1)).sum() / max(len(label), 1))
    return torch.stack(found), torch.stack(right), torch.stack(counts)
