"""EAGLE-1/2, EAGLE-3 and MTP for a target: where they start, what they learn, what is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.drafter import NORMED
from forerun.models.drafter_folder import vocabulary_tensors
from forerun.models.drafters import vocabulary_matrix
from forerun.models.eagle import Eagle, Eagle3, EagleConfig
from forerun.models.eagle_folder import save_eagle
from forerun.models.mtp import Mtp
from forerun.models.mtp_folder import save_mtp
from forerun.training.begin import begin, check_alike, take_over
from forerun.training.device import CPU
from forerun.training.fit import Settings, Task, Worth, fit
from forerun.training.lesson import Lesson, pack, progress_line
from forerun.training.published import LAYER_NAMES, by_published_names
from forerun.training.texts import Text
from forerun.training.unrolled import Batch, batch_of, losses, trainable

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class EagleTraining:
    """What is trained, and how its loss runs."""

    kind: str = "eagle3"
    unroll: int = 5
    """Steps that are drafted one after the other, each from the last one's output: the depth of
    the trees that it will grow."""
    top_k: int | None = None
    """Children of a node, and nodes of a level, that are gone on with in those trees; None: as
    published folders are read, MTP's a chain."""
    decay: float = 0.8
    """Weight of an unrolled step's loss against the one before (EAGLE-3's own)."""
    draft_vocabulary: int = 8192
    """The commonest tokens: EAGLE-3's own vocabulary; the others' loss runs over these columns."""
    intermediate: int | None = None
    """Width of the MLP; None: the target's."""
    batch: int = 4096
    """Padded tokens a step."""


def feature_layers(kind: str, layers: int) -> tuple[int, ...]:
    """The target's hidden states that a drafter of `kind` reads."""
    if kind != "eagle3":
        return (NORMED,)
    if layers < 5:
        raise ForerunError(
            "eagle3 reads what enters an early, a middle and a late layer, and the target has "
            f"{layers} in all: train another kind"
        )
    return (2, layers // 2, layers - 3)


def train_eagle(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    folder: Path,
    training: EagleTraining,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    worth: Worth | None = None,
    device: torch.device = CPU,
) -> None:
    """Trains on those of `texts` that are not held out, and writes the drafter's folder."""
    begun = begin(settings.start, training.kind, checkpoint) if settings.start else None
    lesson = Lesson.of(checkpoint, texts, training.draft_vocabulary, say, begun)
    training = replace(training, draft_vocabulary=len(lesson.ids))
    capacity = lesson.longest + training.unroll + 2
    drafter = trainable(*start(checkpoint, training, lesson.ids, capacity), capacity)
    if begun is not None:
        assert isinstance(begun, Eagle)
        check_alike(begun.config, drafter.config, str(settings.start), ("depth", "top_k"))
        take_over(drafter, dict(begun.named_parameters()), str(settings.start))
    drafter, ends = drafter.to(device), lesson.ends.to(device)
    weights = (training.decay ** torch.arange(training.unroll)).to(device)

    def batch(group: Sequence[Text]) -> Batch:
        return batch_of(group, training.unroll, lesson.columns)

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        found, right, counts = losses(drafter, batch, ends)
        share = right / counts.clamp(min=1)
        return (found * weights).sum(), torch.cat([found.detach(), share])

    groups = pack(lesson.texts, training.batch)

    def epoch(draw: torch.Generator) -> list[list[Text]]:
        return [groups[i] for i in torch.randperm(len(groups), generator=draw).tolist()]

    def save(where: Path, trained: Eagle) -> None:
        write(where, checkpoint, trained, lesson.ids, training, settings)

    facts = f"{asdict(training)} {lesson.facts}"
    task = Task(drafter, len(groups), epoch, batch, loss, facts, progress_line, save)
    fit(task, folder, settings, say, worth)


def start(
    checkpoint: Checkpoint, training: EagleTraining, ids: Tensor, capacity: int
) -> tuple[Eagle, DraftLayerConfig]:
    """A drafter that begins as the target's own layer, in float32, and its layer's sizes.

    Its matrices are those of the target's last layer but two, applied to the last feature; what the
    embedding enters by is zero. Its vocabulary layer is the target's.
    """
    config = checkpoint.config
    width = training.intermediate or config.intermediate_size
    layer = replace(DraftLayerConfig.of(config), intermediate_size=width)
    top_k = training.top_k or (1 if training.kind == "mtp" else EagleConfig.top_k)
    layers = feature_layers(training.kind, config.num_layers)
    eagle = EagleConfig(layer, layers, training.unroll, top_k)
    make = STARTS.get(training.kind)
    if make is None:
        raise ForerunError(f"kind {training.kind!r}: choose one of {', '.join(STARTS)}")
    return make(checkpoint, eagle, ids, capacity), layer


def target_layer(checkpoint: Checkpoint, layer: DraftLayerConfig, from_end: int = 3) -> Tensors:
    """The target's last layer but two (last: 1), by a layer's names; its MLP cut to the width."""
    prefix = f"model.layers.{max(checkpoint.config.num_layers - from_end, 0)}."
    found = {
        name.removeprefix(prefix): weight.clone()
        for name, weight in checkpoint.weights.items()
        if name.startswith(prefix)
    }
    width = layer.intermediate_size
    if width > checkpoint.config.intermediate_size:
        raise ForerunError(
            f"--intermediate {width}: a drafter starts from one of the target's layers, which are "
            f"{checkpoint.config.intermediate_size} wide"
        )
    for name in ("gate_proj", "up_proj"):
        found[f"mlp.{name}.weight"] = found[f"mlp.{name}.weight"][:width]
    found["mlp.down_proj.weight"] = found["mlp.down_proj.weight"][:, :width]
    return found


def _start_eagle3(checkpoint: Checkpoint, config: EagleConfig, ids: Tensor, capacity: int) -> Eagle:
    layer, hidden = target_layer(checkpoint, config.layer), config.layer.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer[f"self_attn.{name}.weight"]
        layer[f"self_attn.{name}.weight"] = torch.cat([torch.zeros_like(weight), weight], dim=1)
    norm = layer.pop("input_layernorm.weight")
    weights = {f"layers.0.{name}": weight for name, weight in layer.items()}
    weights["layers.0.hidden_norm.weight"] = norm
    weights["layers.0.input_layernorm.weight"] = torch.ones(hidden)
    weights["norm.weight"] = checkpoint.weights["model.norm.weight"].clone()
    weights["lm_head.weight"] = vocabulary_matrix(checkpoint)[ids].clone()
    last = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1)
    return Eagle3(config, weights | {"fc.weight": last}, capacity, ids)


def _start_eagle(checkpoint: Checkpoint, config: EagleConfig, ids: Tensor, capacity: int) -> Eagle:
    layer, hidden = target_layer(checkpoint, config.layer), config.layer.hidden_size
    del layer["input_layernorm.weight"]
    weights = {f"layers.0.{name}": weight for name, weight in layer.items()}
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    return Eagle(config, weights | {"fc.bias": torch.zeros(hidden)}, capacity)


def _start_mtp(checkpoint: Checkpoint, config: EagleConfig, ids: Tensor, capacity: int) -> Eagle:
    layer, hidden = target_layer(checkpoint, config.layer), config.layer.hidden_size
    ones = {f"{name}_layernorm.weight": torch.ones(hidden) for name in ("token", "hidden")}
    final = checkpoint.weights["model.norm.weight"].clone()
    pair = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    return Mtp(
        config,
        layer | ones | {"final_layernorm.weight": final, "input_proj.weight": pair},
        capacity,
    )


STARTS: dict[str, Callable[[Checkpoint, EagleConfig, Tensor, int], Eagle]] = {
    "eagle": _start_eagle,
    "eagle3": _start_eagle3,
    "mtp": _start_mtp,
}


def write(
    folder: Path,
    checkpoint: Checkpoint,
    drafter: Eagle,
    ids: Tensor,
    training: EagleTraining,
    settings: Settings,
) -> None:
    """The drafter's folder, in float16."""
    tensors = {name: weight.to(torch.float16) for name, weight in published(drafter).items()}
    facts = {
        "target": checkpoint.name,
        "target_digest": checkpoint.digest,
        "training": settings.recorded(training),
    }
    if training.kind == "mtp":
        save_mtp(folder, drafter.config, tensors, facts)
        return
    if training.kind == "eagle3":
        tensors |= vocabulary_tensors(ids, checkpoint.config.vocab_size)
    save_eagle(folder, drafter.config, tensors, facts)


def published(drafter: Eagle) -> Tensors:
    """The drafter's weights by published names, matrices as `[out, in]`."""
    prefix = "" if drafter.kind == "mtp" else "layers.0."
    outer = OUTER_NAMES[drafter.kind]
    return by_published_names(drafter, lambda name: outer.get(name) or prefix + LAYER_NAMES[name])


OUTER_NAMES = {
    "eagle": {"fc": "fc"},
    "eagle3": {
        "fc": "fc",
        "input_norm": "layers.0.input_layernorm",
        "hidden_norm": "layers.0.hidden_norm",
        "norm": "norm",
        "head": "lm_head",
    },
    "mtp": {
        "fc": "input_proj",
        "token_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "input_norm": "input_layernorm",
        "norm": "final_layernorm",
    },
}
