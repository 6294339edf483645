"""DFlash for a target: where it starts, the blocks it learns from, what is written.

As in arXiv:2602.06036: blocks begin at random tokens of an answer, several a text in one forward.
A block sees the target's true features before its anchor, and itself. Slot k's loss is the
cross-entropy against the target's own distribution at its position, and weighs less the later it
is: a slot only counts where all slots before it were right.

What is trained is the very module that drafts (`forerun.models.dflash`). The embedding and the
vocabulary layer are the target's and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.dflash import DFlash, DFlashConfig, dflash
from forerun.models.dflash_folder import BUDGET, dflash_shapes, save_dflash
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.drafter import NORMED
from forerun.models.drafter_folder import vocabulary_tensors
from forerun.models.drafters import vocabulary_matrix
from forerun.training.begin import begin, check_alike, take_over
from forerun.training.device import CPU
from forerun.training.eagle import target_layer
from forerun.training.fit import Settings, Task, Worth, fit
from forerun.training.lesson import Lesson, pack, progress_line
from forerun.training.published import by_published_names, layered
from forerun.training.texts import Text
from forerun.training.unrolled import Columns, trainable

Anchored = tuple[Text, Tensor]
"""A text and the positions `[R]` at which blocks begin."""


@dataclass(frozen=True)
class DFlashTraining:
    """What is trained, and how its loss runs."""

    depth: int = 2
    """Decoder layers."""
    block: int = 8
    """Slots, the anchor included."""
    features: tuple[int, ...] | None = None
    """The target's layers that are read, as `Drafter.feature_layers`; None: `spread_layers`."""
    reach: float | None = None
    """Slots over which the loss's weight falls by a factor of e; None: `default_reach`."""
    anchors: int = 16
    """Blocks a text at most, drawn anew each epoch."""
    draft_vocabulary: int = 8192
    """The commonest tokens, whose columns it copies; all of them: the target's own layer serves."""
    intermediate: int | None = None
    """Width of the MLP; None: the target's."""
    batch: int = 4096
    """Padded tokens of context a step."""


def features_read(training: DFlashTraining, layers: int) -> tuple[int, ...]:
    """Those asked for, or the default, of a target of so many layers."""
    features = training.features or spread_layers(layers)
    for layer in features:
        if not NORMED <= layer <= layers:
            raise ForerunError(
                f"--feature-layer {layer}: the target's hidden states are numbered from 0, what "
                f"enters the first layer, to {layers}, and {NORMED} after the final norm"
            )
    return features


def spread_layers(layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` of the target's hidden states, from the second layer's input to the last one's."""
    return tuple(sorted({1 + i * (layers - 2) // (count - 1) for i in range(count)}))


def default_reach(block: int) -> float:
    """The paper's 4, 5 and 7 for blocks of 8, 10 and 16, and lines between them."""
    return min(block / 2, 5 + (block - 10) / 3)


def train_dflash(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    folder: Path,
    training: DFlashTraining,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    worth: Worth | None = None,
    device: torch.device = CPU,
) -> DFlash:
    """Trains on those of `texts` that are not held out, and writes the drafter's folder."""
    begun = begin(settings.start, "dflash", checkpoint) if settings.start else None
    lesson = Lesson.of(checkpoint, texts, training.draft_vocabulary, say, begun)
    training = replace(training, draft_vocabulary=len(lesson.ids))
    drafter = start(checkpoint, training, lesson, lesson.longest + training.block)
    if begun is not None:
        assert isinstance(begun, DFlash)
        mask = begun.config.mask_token_id
        drafter.config = replace(drafter.config, mask_token_id=mask)
        theirs = begun.config
        if not any(theirs.sliding_layers + theirs.causal_layers):  # none, said layer by layer
            theirs = replace(theirs, sliding_layers=(), causal_layers=())
        check_alike(theirs, drafter.config, str(settings.start), ("budget",))
        take_over(drafter, dict(begun.named_parameters()), str(settings.start))
    reach = training.reach or default_reach(training.block)
    weights = torch.exp(-torch.arange(training.block - 1) / reach).to(device)
    drafter, ends = drafter.to(device), lesson.ends.to(device)
    groups = pack(lesson.texts, training.batch)

    def epoch(draw: torch.Generator) -> list[list[Anchored]]:
        order = torch.randperm(len(groups), generator=draw).tolist()
        return [
            [(text, draw_anchors(text, training.anchors, draw)) for text in groups[place]]
            for place in order
        ]

    def batch(group: Sequence[Anchored]) -> Blocks:
        return blocks_of(group, drafter.config, lesson.columns)

    def loss(blocks: Blocks) -> tuple[Tensor, Tensor]:
        sums, counts, right, known = losses(drafter, blocks, ends)
        total = (sums * weights).sum() / (counts * weights).sum().clamp(min=1e-9)
        found = sums.detach() / counts.clamp(min=1)
        return total, torch.cat([found, right / known.clamp(min=1)])

    def save(where: Path, trained: DFlash) -> None:
        write(where, checkpoint, trained, training, settings)

    facts = f"{asdict(training)} {lesson.facts}"
    task = Task(drafter, len(groups), epoch, batch, loss, facts, progress_line, save)
    fit(task, folder, settings, say, worth)
    return drafter


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
    flat = [x.flatten(1) for x in (tokens, at, columns[truth], ahead, known)]
    rows = (flat[-1] & (flat[2] >= 0)).nonzero().T
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


def start(
    checkpoint: Checkpoint, training: DFlashTraining, lesson: Lesson, capacity: int
) -> DFlash:
    """A drafter that begins as layers of the target which read the last feature, trainable.

    The mask is the rarest token of the texts: of equals the first, since vocabularies begin with
    special tokens.
    """
    target, ids = checkpoint.config, lesson.ids
    width = training.intermediate or target.intermediate_size
    config = DFlashConfig(
        layer=replace(DraftLayerConfig.of(target), intermediate_size=width),
        num_layers=training.depth,
        feature_layers=features_read(training, target.num_layers),
        block_size=training.block,
        mask_token_id=int(lesson.frequencies.argmin()),
        budget=min(BUDGET, len(ids)),
    )
    weights = start_weights(checkpoint, config)
    reduced = len(ids) < target.vocab_size
    if reduced:
        weights["lm_head.weight"] = vocabulary_matrix(checkpoint)[ids]
    drafter = dflash(config, weights, capacity, ids if reduced else None)
    drafter = trainable(drafter, config.layer, capacity)
    if drafter.head is not None:
        drafter.head.requires_grad_(False)
    return drafter


def start_weights(checkpoint: Checkpoint, config: DFlashConfig) -> dict[str, Tensor]:
    """By published names: the target's layers up to its last but two.

    What a layer's norm scales is taken into its matrices, for the context has one norm for all
    layers. Queries and keys that the target does not norm get the gain that keeps their size where
    all channels are as large.
    """
    hidden, count = config.layer.hidden_size, len(config.feature_layers)
    last = torch.cat([torch.zeros(hidden, (count - 1) * hidden), torch.eye(hidden)], dim=1)
    weights = {
        "fc.weight": last,
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": checkpoint.weights["model.norm.weight"].clone(),
    }
    for number in range(config.num_layers):
        layer = target_layer(checkpoint, config.layer, 2 + config.num_layers - number)
        gain = layer["input_layernorm.weight"]
        layer["input_layernorm.weight"] = torch.ones(hidden)
        for name in "qkv":
            layer[f"self_attn.{name}_proj.weight"] *= gain
        for name in "qk":
            matrix = layer[f"self_attn.{name}_proj.weight"]
            size = (matrix.pow(2).sum() / len(matrix)).sqrt()
            own = size.expand(config.layer.head_dim).clone()
            layer.setdefault(f"self_attn.{name}_norm.weight", own)
        weights |= {f"layers.{number}.{name}": weight for name, weight in layer.items()}
    known = dict(dflash_shapes(config))
    return {name: weight for name, weight in weights.items() if name in known}


def published(drafter: DFlash) -> dict[str, Tensor]:
    """The drafter's weights by published names, matrices as `[out, in]`."""
    outer = {"fuse": "fc", "context_norm": "hidden_norm", "norm": "norm", "head": "lm_head"}
    return by_published_names(drafter, layered(outer))


def write(
    folder: Path,
    checkpoint: Checkpoint,
    drafter: DFlash,
    training: DFlashTraining,
    settings: Settings,
) -> None:
    """The drafter's folder, in float16."""
    tensors = {name: weight.to(torch.float16) for name, weight in published(drafter).items()}
    if drafter.ids is not None:
        tensors |= vocabulary_tensors(drafter.ids.cpu(), checkpoint.config.vocab_size)
    facts = {
        "target": checkpoint.name,
        "target_digest": checkpoint.digest,
        "training": settings.recorded(training),
    }
    save_dflash(folder, drafter.config, tensors, facts)
