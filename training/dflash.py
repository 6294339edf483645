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
from forerun.training.dflash_blocks import Anchored, Blocks, blocks_of, draw_anchors, losses
from forerun.training.eagle import target_layer
from forerun.training.fit import Settings, Task, Worth, fit
from forerun.training.lesson import Lesson, pack, progress_line
from forerun.training.published import by_published_names, layered
from forerun.training.texts import Text
from forerun.training.unrolled import trainable


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
