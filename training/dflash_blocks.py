"""The blocks that DFlash learns from, and their loss: several a text, each at an answer token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.dflash import DFlash, DFlashConfig
from forerun.training.texts import Text
from forerun.training.unrolled import Columns

Anchored = tuple[Text, Tensor]
"""A text and the positions `[R]` at which blocks begin."""


def draw_anchors(text: Text, count: int, draw: torch.Generator) -> Tensor:
    """Positions `[R]` of answer tokens that another one follows, in order, none twice."""
    places = torch.randperm(len(text.states) - 1, generator=draw)[:count]
    return text.prompt + places.sort().values


@dataclass(frozen=True)
class Blocks:
    """B texts, padded; R blocks of n slots each, side by side. Padding blocks know nothing."""

    features: Tensor  # [B, C, F]
    states: Tensor  # [B, m, H]: what chose answer token 0, 1, ...
    tokens: Tensor  # [B, R * n] int64: anchors and masks
    at: Tensor  # [B, R * n] int64: the position of each slot's anchor
    label: Tensor  # [B, R * n] int64: the true token's place among the drafter's, or -1
    ahead: Tensor  # [B, R * n] int64: which answer token a slot predicts
    known: Tensor  # [B, R * n] bool: slots that predict one, the anchors' not
    rows: Tensor  # [2, u] int64: text and slot of those that predict one that the drafter knows


def blocks_of(group: Sequence[Anchored], config: DFlashConfig, columns: Tensor) -> Blocks:
    """Pads texts with their anchors. `columns` `[V + 1]` are the tokens' places among the
    drafter's, or -1.

    All that depends on the data's values is settled here: a GPU would wait for the host.
    """
    first = group[0][0]
    size, slots = len(group), config.block_size
    blocks = max(len(anchors) for _, anchors in group)
    context = max(int(anchors[-1]) for _, anchors in group)
    answer = max(len(text.states) for text, _ in group)
    features = first.features.new_zeros(size, context, first.features.shape[1])
    states = first.states.new_zeros(size, answer, first.states.shape[1])
    tokens = torch.full((size, blocks, slots), config.mask_token_id)
    at, truth, ahead = (torch.zeros(size, blocks, slots, dtype=torch.int64) for _ in range(3))
    known = torch.zeros(size, blocks, slots, dtype=torch.bool)
    for row, (text, anchors) in enumerate(group):
        n, real = len(text.tokens), len(anchors)
        features[row, : min(n, context)] = text.features[:context]
        states[row, : len(text.states)] = text.states
        at[row] = text.prompt
        at[row, :real] = anchors[:, None]
        positions = at[row] + torch.arange(slots)  # [R, n]
        truth[row] = text.tokens[positions.clamp(max=n - 1)]
        ahead[row] = (positions - text.prompt).clamp(max=answer - 1)
        known[row, :real, 1:] = positions[:real, 1:] < n
        tokens[row, :, 0] = truth[row, :, 0]
    known, label = known.flatten(1), columns[truth].flatten(1)
    rows = (known & (label >= 0)).nonzero().T
    flat = tokens.flatten(1), at.flatten(1), label, ahead.flatten(1), known
    return Blocks(features, states, *flat, rows)


def read_blocks(drafter: DFlash, blocks: Blocks, vocabulary: Columns) -> Tensor:
    """Every slot after all layers, `[B, R * n, H]`."""
    slots = drafter.config.block_size
    width, rows = blocks.features.shape[1], blocks.tokens.shape[1]
    place = torch.arange(max(width, rows), device=blocks.at.device)
    places, slot = place[:width].expand(len(blocks.tokens), -1), place[:rows]
    states = drafter.context(blocks.features.to(torch.float32), places)
    number = slot // slots
    within = (number[:, None] == number).expand(len(blocks.tokens), -1, -1)
    before = places[:, None] < blocks.at[..., None]
    positions = blocks.at + slot % slots
    masks = [(before, within)] * drafter.config.num_layers
    return drafter.through(vocabulary.embedding(blocks.tokens), positions, states, masks)


def losses(
    drafter: DFlash, blocks: Blocks, vocabulary: Columns
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each slot behind the anchor, `[n - 1]` each: the summed cross-entropy and its terms; how
    many had all slots up to it right, and how many there were."""
    slots, (text, slot) = drafter.config.block_size, blocks.rows
    x = read_blocks(drafter, blocks, vocabulary)
    logits = drafter.predict(x[text, slot], vocabulary).to(torch.float32)  # [u, V']
    with torch.no_grad():
        wanted = vocabulary.logits(blocks.states.to(vocabulary.output.dtype))
        wanted = wanted.to(torch.float32).softmax(-1)  # [B, m, V']
        wanted = wanted[text, blocks.ahead[text, slot]]  # [u, V']
        hit = torch.zeros_like(blocks.known)
        hit[text, slot] = logits.argmax(-1) == blocks.label[text, slot]
        known = blocks.known.reshape(-1, slots)[:, 1:]  # [B * R, n - 1]
        right = hit.reshape(-1, slots)[:, 1:].cumprod(1)
    entropy = torch.zeros_like(blocks.label, dtype=torch.float32)
    entropy[text, slot] = -(wanted * logits.log_softmax(-1)).sum(-1)
    usable = blocks.known & (blocks.label >= 0)
    sums, counts = (x.reshape(-1, slots)[:, 1:].sum(0) for x in (entropy, usable))
    return sums, counts, right.sum(0), known.sum(0)
