"""A small language model of the target's own vocabulary, distilled from the target's answers.

It learns the target's distribution at every answer token, over the tokens that it may draft, and,
with less weight, to continue the prompts as they are: it sees no feature of the target, so that
what it knows of a prompt is what it has read itself.

What is trained is the very module that drafts (`forerun.models.draft_model`), its vocabulary layer
tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.draft_folder import save_draft_model
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.draft_model import DraftModel
from forerun.models.weights import tensor_shapes
from forerun.training.begin import begin, check_alike, take_over
from forerun.training.device import CPU
from forerun.training.fit import Settings, Task, Worth, fit
from forerun.training.lesson import Lesson, pack
from forerun.training.published import by_published_names, layered
from forerun.training.texts import Text
from forerun.training.unrolled import Columns, trainable

HEAD_WIDTH = 64
"""Of an attention head, where nothing else is asked for."""
SPREAD = 0.02
"""Standard deviation of the layers' first weights, which is Llama's."""


@dataclass(frozen=True)
class DraftTraining:
    """The model's sizes, and what its loss runs over."""

    width: int = 192
    """Hidden size."""
    depth: int = 2
    """Decoder layers."""
    heads: int | None = None
    """Attention heads; None: one for each 64 of the width."""
    intermediate: int | None = None
    """Width of the MLP; None: 8/3 of the hidden size, as Llama has it."""
    draft_vocabulary: int = 8192
    """The commonest tokens, which it can draft. It reads all."""
    reading: float = 0.1
    """Weight of the prompts' own tokens against the answers'."""
    batch: int = 4096
    """Padded tokens a step."""


class TiedColumns(nn.Module):
    """Logits of the tokens `ids` from their own embeddings, in torch, which autograd knows."""

    ids: Tensor

    def __init__(self, embed: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.embed = embed
        self.register_buffer("ids", ids)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` -> `[..., V']`."""
        return x @ self.embed.get_parameter("weight")[self.ids].T


def train_draft(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    folder: Path,
    training: DraftTraining,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    worth: Worth | None = None,
    device: torch.device = CPU,
) -> DraftModel:
    """Trains on those of `texts` that are not held out, and writes the drafter's folder."""
    begun = begin(settings.start, "draft", checkpoint) if settings.start else None
    lesson = Lesson.of(checkpoint, texts, training.draft_vocabulary, say, begun)
    training = replace(training, draft_vocabulary=len(lesson.ids))
    drafter = start(checkpoint, training, lesson.ids, lesson.longest, settings.seed)
    if begun is not None:
        assert isinstance(begun, DraftModel)
        check_alike(begun.config, drafter.config, str(settings.start))
        tied = {n: w for n, w in begun.named_parameters() if not n.startswith("head.")}
        take_over(drafter, tied, str(settings.start))
    groups = pack(lesson.texts, training.batch)
    drafter, ends = drafter.to(device), lesson.ends.to(device)

    def epoch(draw: torch.Generator) -> list[list[Text]]:
        return [groups[i] for i in torch.randperm(len(groups), generator=draw).tolist()]

    def batch(group: Sequence[Text]) -> Pages:
        return pages_of(group, lesson.columns)

    def loss(pages: Pages) -> tuple[Tensor, Tensor]:
        answers, prompts, right = losses(drafter, pages, ends)
        figures = torch.stack([answers.detach(), prompts.detach(), right])
        return answers + training.reading * prompts, figures

    def told(number: int, figures: Tensor) -> str:
        answers, prompts, right = figures.tolist()
        return f"epoch {number}: loss {answers:.3f}, of prompts {prompts:.3f}; right: {right:.3f}"

    def save(where: Path, trained: DraftModel) -> None:
        write(where, checkpoint, trained, training, settings)

    facts = f"{asdict(training)} {lesson.facts}"
    task = Task(drafter, len(groups), epoch, batch, loss, facts, told, save)
    fit(task, folder, settings, say, worth)
    return drafter


@dataclass(frozen=True)
class Pages:
    """B texts, padded. Answer row r is where answer token r is predicted."""

    tokens: Tensor  # [B, n] int64
    states: Tensor  # [B, m, H]: what chose answer token 0, 1, ...
    places: Tensor  # [B, m] int64: positions of the answer rows
    known: Tensor  # [B, m] bool: answer rows that are there
    rows: Tensor  # [2, u] int64: text and answer row of those whose token it may draft
    labels: Tensor  # [u] int64: those tokens' places among the ones that it may draft
    asked: Tensor  # [2, p] int64: text and position before a prompt's token that it may draft
    asked_labels: Tensor  # [p] int64


def pages_of(texts: Sequence[Text], columns: Tensor) -> Pages:
    """Pads `texts`. `columns` `[V]` are the tokens' places among those it may draft, or -1.

    All that depends on the data's values is settled here: a GPU would wait for the host.
    """
    longest = max(len(text.tokens) for text in texts)
    rows = max(len(text.states) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    states = texts[0].states.new_zeros(len(texts), rows, texts[0].states.shape[1])
    prompt = torch.tensor([text.prompt for text in texts])
    answer = torch.tensor([len(text.states) for text in texts])
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
        states[row, : len(text.states)] = text.states
    places = (prompt[:, None] - 1 + torch.arange(rows)).clamp(max=longest - 2)
    known = torch.arange(rows) < answer[:, None]
    label = columns[tokens[:, 1:]]  # [B, n - 1]
    truth = label.gather(1, places)
    usable = known & (truth >= 0)
    asked = (torch.arange(longest - 1) < prompt[:, None] - 1) & (label >= 0)
    chosen = (usable.nonzero().T, truth[usable], asked.nonzero().T, label[asked])
    return Pages(tokens, states, places, known, *chosen)


def read(drafter: DraftModel, tokens: Tensor) -> Tensor:
    """Whole texts `[B, n]` -> each row's hidden state `[B, n, H]`, from which the head speaks."""
    size, length = tokens.shape
    caches = drafter.states()[: 2 * len(drafter.layers)]
    none = [spec.zeros(size, 0, tokens.device) for spec in caches]
    places = torch.arange(length, device=tokens.device)
    causal = (places[:, None] >= places).expand(size, -1, -1)
    start = tokens.new_zeros(size, 1)
    x, _ = drafter.read(tokens, places.expand(size, -1), none, start, None, causal)
    hidden: Tensor = drafter.norm(x)
    return hidden


def losses(drafter: DraftModel, pages: Pages, ends: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy against the target's distribution at answer tokens, and against the
    tokens themselves in prompts; the share of answer tokens that come first."""
    hidden, (text, row) = read(drafter, pages.tokens), pages.rows
    wide = pages.places[..., None].expand(-1, -1, hidden.shape[2])
    logits = drafter.head(hidden.gather(1, wide)[text, row]).to(torch.float32)  # [u, V']
    with torch.no_grad():
        wanted = ends.logits(pages.states[text, row].to(ends.output.dtype))
        wanted = wanted.to(torch.float32).softmax(-1)
        right = (logits.argmax(-1) == pages.labels).sum() / pages.known.sum()
    answers = -(wanted * logits.log_softmax(-1)).sum() / max(len(pages.labels), 1)
    text, position = pages.asked
    said = drafter.head(hidden[:, :-1][text, position]).to(torch.float32)
    prompts = nn.functional.cross_entropy(said, pages.asked_labels, reduction="sum")
    return answers, prompts / max(len(pages.asked_labels), 1), right


def start(
    checkpoint: Checkpoint, training: DraftTraining, ids: Tensor, capacity: int, seed: int
) -> DraftModel:
    """A model that can be trained: random layers between the target's embedding in fewer
    dimensions, in which tokens that the target takes for alike begin alike."""
    config = small_config(checkpoint.config, training)
    draw = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=draw) * SPREAD
        for name, shape in tensor_shapes(config)
    }
    embedding = checkpoint.weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = in_fewer_dimensions(embedding, training.width)
    reduced = ids if len(ids) < config.vocab_size else None
    drafter = DraftModel(config, weights, capacity, ids=reduced)
    drafter.head = TiedColumns(drafter.embed, ids)
    return trainable(drafter, DraftLayerConfig.of(config), capacity)


def small_config(target: TargetConfig, training: DraftTraining) -> TargetConfig:
    """A Llama of the wanted sizes, its vocabulary layer tied to the embedding."""
    width = training.width
    heads = training.heads or max(width // HEAD_WIDTH, 1)
    if width % (2 * heads):
        raise ForerunError(
            f"--width {width} with {heads} heads: a head needs an even share of it: choose "
            f"another --width, or --heads of which {width} is an even multiple"
        )
    return TargetConfig(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=training.intermediate or round(width / 24) * 64 or 64,
        num_layers=training.depth,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        rms_norm_eps=1e-5,
        max_positions=target.max_positions,
        rope=RopeConfig(target.rope.theta, width // heads),
        tie_embeddings=True,
    )


def in_fewer_dimensions(embedding: Tensor, width: int) -> Tensor:
    """`[V, H]` -> `[V, width]`: the projection that keeps most (a truncated SVD), rows of length 1
    on average; further dimensions than there are begin as zeros."""
    _, vectors = torch.linalg.eigh(embedding.T @ embedding)  # ascending
    rows = embedding @ vectors.flip(1)[:, :width]
    rows = rows / rows.norm(dim=1).mean()
    return nn.functional.pad(rows, (0, width - rows.shape[1]))


def write(
    folder: Path,
    checkpoint: Checkpoint,
    drafter: DraftModel,
    training: DraftTraining,
    settings: Settings,
) -> None:
    """The drafter's folder, in float16."""
    outer = {"embed": "model.embed_tokens", "norm": "model.norm"}
    tensors = by_published_names(drafter, layered(outer, "model.layers."))
    halves = {name: weight.to(torch.float16) for name, weight in tensors.items()}
    facts = {
        "torch_dtype": "float16",
        "target": checkpoint.name,
        "target_digest": checkpoint.digest,
        "training": settings.recorded(training),
    }
    ids = torch.arange(drafter.config.vocab_size) if drafter.ids is None else drafter.ids.cpu()
    save_draft_model(folder, drafter.config, halves, ids, checkpoint, facts)
