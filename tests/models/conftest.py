"""Tiny random targets for the step's tests, and a loop that runs a step eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.draft_model import DraftModel
from forerun.models.eagle import Eagle, Eagle3, EagleConfig
from forerun.models.linear import Linear
from forerun.models.medusa import Medusa, MedusaConfig
from forerun.models.mtp import Mtp
from forerun.models.step import Step, StepInputs, StepOutputs
from forerun.models.target import Caches, Target
from forerun.models.weights import tensor_shapes
from forerun.runtime.sampling import uniform_tables
from forerun.runtime.tree import Tree

SLOTS = 192


def tiny_config(**changes: Any) -> TargetConfig:
    """Two layers, grouped heads, everything small."""
    config = TargetConfig(
        architecture="llama",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_positions=SLOTS,
        rope=RopeConfig(10000.0, 8),
    )
    return replace(config, **changes)


def random_weights(config: TargetConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint's random weights, spread enough that arg-maxes vary."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*shape, generator=generator) * 0.4 + ("norm" in name)
        for name, shape in tensor_shapes(config)
    }


def random_target(config: TargetConfig, seed: int = 0, attention: str = "grouped") -> Target:
    """A target of random weights."""
    return Target(config, random_weights(config, seed), SLOTS, attention).eval()


def random_draft_model(
    seed: int = 0,
    gamma: int = 4,
    acceptance: str = "matching",
    ids: torch.Tensor | None = None,
    **changes: Any,
) -> DraftModel:
    """A draft model of random weights; with the target's seed and sizes it is the target. It drafts
    the tokens `ids` (None: all)."""
    config = tiny_config(**changes)
    return DraftModel(config, random_weights(config, seed), SLOTS, gamma, acceptance, ids).eval()


def random_medusa(target: Target, heads: int = 3, top_k: int = 3, seed: int = 1) -> Medusa:
    """Random heads over the whole vocabulary, with plausible accuracies for the tree's shape."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocabulary = target.config.hidden_size, target.config.vocab_size
    accuracy = tuple(tuple(0.5 / (1 + d + k) for k in range(top_k)) for d in range(heads))
    config = MedusaConfig(heads, 1, hidden, top_k, accuracy)
    blocks = [[Linear(torch.randn(hidden, hidden, generator=generator))] for _ in range(heads)]
    return Medusa(config, blocks, [Linear(torch.randn(hidden, vocabulary, generator=generator))])


def random_eagle(
    target: Target, kind: str = "eagle3", seed: int = 1, vocabulary: int = 40, **changes: Any
) -> Eagle:
    """A random drafter of any kind; `vocabulary` is EAGLE-3's own, `changes` the config's."""
    hidden = target.config.hidden_size
    draw = torch.Generator().manual_seed(seed)
    layer = DraftLayerConfig(hidden, 24, 4, 2, 8, 1e-5, SLOTS, RopeConfig(5000.0, 8))
    layer = changes.pop("layer", layer)
    weights = eagle_weights(kind, hidden, vocabulary, draw)
    layers = target.config.num_layers
    three = {"feature_layers": (0, layers // 2, layers)} if kind == "eagle3" else {}
    config = EagleConfig(layer, **({"depth": 3, "top_k": 4} | three | changes))
    if kind != "eagle3":
        return (Eagle if kind == "eagle" else Mtp)(config, weights, SLOTS).eval()
    ids = torch.randperm(target.config.vocab_size, generator=draw)[:vocabulary].sort().values
    return Eagle3(config, weights, SLOTS, ids).eval()


def eagle_weights(
    kind: str, hidden: int, vocabulary: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """By published names, EAGLE's layer under `layers.0.`; 4 heads of 8, 2 of them for keys."""
    wide = 2 * hidden if kind == "eagle3" else hidden
    shapes = {
        "fc.weight": (hidden, 3 * hidden if kind == "eagle3" else 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (32, wide),
        "layers.0.self_attn.k_proj.weight": (16, wide),
        "layers.0.self_attn.v_proj.weight": (16, wide),
        "layers.0.self_attn.o_proj.weight": (hidden, 32),
        "layers.0.mlp.gate_proj.weight": (24, hidden),
        "layers.0.mlp.up_proj.weight": (24, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 24),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    if kind == "eagle3":
        shapes |= {
            "layers.0.input_layernorm.weight": (hidden,),
            "layers.0.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (vocabulary, hidden),
        }
    elif kind == "eagle":
        shapes["fc.bias"] = (hidden,)
    else:
        shapes = {name.removeprefix("layers.0."): shape for name, shape in shapes.items()}
        shapes["input_proj.weight"] = shapes.pop("fc.weight")
        for norm in ("token", "hidden", "input", "final"):
            shapes[f"{norm}_layernorm.weight"] = (hidden,)
    return {
        name: torch.randn(*shape, generator=draw) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


@dataclass
class Run:
    """What an eager generation left behind."""

    tokens: list[list[int]]
    """Per row: every committed token, the prefill's first."""
    counts: list[list[int]]
    """Per row: how many each step committed."""
    caches: Caches
    last: StepInputs
    states: list[torch.Tensor]


def generate(
    step: Step,
    prompt: Sequence[int] | Sequence[Sequence[int]],
    new: int,
    nodes: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    chunk: int | None = None,
) -> Run:
    """The plain loop over an eager step: prefill (in chunks), then steps until every row is done.

    Prompts of a batch have one length. Several seeds with one prompt make a batch as well.
    """
    seeds = [seed] if isinstance(seed, int) else list(seed)
    rows = [list(prompt)] if isinstance(prompt[0], int) else [list(row) for row in prompt]
    rows = rows * len(seeds) if len(rows) == 1 else rows
    seeds = seeds * len(rows) if len(seeds) == 1 else seeds
    batch, length = len(rows), len(rows[0])
    tree = step.drafter.tree(nodes)
    caches = step.target.empty_caches(batch, SLOTS)
    states = [
        torch.zeros(
            [{"batch": batch, "slots": SLOTS}.get(axis, axis) for axis in spec.shape],
            dtype=spec.dtype,
        )
        for spec in step.drafter.states()
    ]
    fixed = {
        "uniforms": torch.stack(
            [torch.from_numpy(uniform_tables(s, SLOTS, step.drafter.tables)) for s in seeds]
        ),
        "temperature": torch.full((batch,), temperature),
        "top_k": torch.full((batch,), top_k),
        "top_p": torch.full((batch,), top_p),
        "limit": torch.full((batch,), length + new),
        "slots": torch.tensor(tree.slots) if tree else torch.arange(nodes),
        "remembering": torch.tensor(nodes > 1),
        "drafting": torch.tensor(nodes > 1),
    }
    tokens: list[list[int]] = [[] for _ in rows]
    counts: list[list[int]] = [[] for _ in rows]
    with torch.no_grad():
        for start in range(0, length, chunk or length):
            part = torch.tensor([row[start : start + (chunk or length)] for row in rows])
            size = part.shape[1]
            known = start + size < length
            forced = [row[start + size] if known else -1 for row in rows]
            inputs = StepInputs(
                tokens=part,
                length=torch.full((batch,), start),
                pending_count=torch.zeros(batch, dtype=torch.int64),
                pending=step.target.no_pending(batch),
                depth=torch.arange(size).expand(batch, -1),
                ancestors=torch.ones(size, size, dtype=torch.bool).tril().expand(batch, -1, -1),
                verify=torch.tensor([size - 1]),
                parents=torch.zeros(batch, 1, dtype=torch.int64),
                forced=torch.tensor(forced),
                **fixed,
            )
            outputs, caches, states = step(inputs, caches, states)
        for row in range(batch):
            tokens[row].append(int(outputs.emitted[row, 0]))
        while True:
            inputs = replace(
                inputs,
                tokens=outputs.next_tokens,
                length=outputs.next_length,
                pending_count=outputs.count,
                pending=outputs.next_pending,
                verify=torch.arange(nodes),
                forced=torch.full((batch,), -1),
                **shape_of(outputs, tree, batch),
            )
            before = (caches, states)
            outputs, caches, states = step(inputs, caches, states)
            if not outputs.count.any():
                return Run(tokens, counts, before[0], inputs, before[1])
            for row, count in enumerate(outputs.count.tolist()):
                tokens[row] += outputs.emitted[row, :count].tolist()
                if count:
                    counts[row].append(count)


def shape_of(outputs: StepOutputs, tree: Tree | None, batch: int) -> dict[str, torch.Tensor]:
    """The next step's tree: what the drafter grew, or the fixed one."""
    if tree is None:
        names = ("depth", "ancestors", "parents")
        return {name: getattr(outputs, f"next_{name}") for name in names}
    return {
        "depth": torch.from_numpy(tree.depths).expand(batch, -1),
        "ancestors": torch.from_numpy(tree.ancestors).expand(batch, -1, -1),
        "parents": torch.tensor(tree.parents).clamp(min=0).expand(batch, -1),
    }


@pytest.fixture
def make_target() -> Callable[..., Target]:
    """`make_target(seed=0, attention="grouped", **config changes)`."""

    def make(seed: int = 0, attention: str = "grouped", **changes: Any) -> Target:
        return random_target(tiny_config(**changes), seed, attention)

    return make


@pytest.fixture
def make_medusa() -> Callable[..., Medusa]:
    """Random Medusa heads for a target."""
    return random_medusa


@pytest.fixture
def make_draft_model() -> Callable[..., DraftModel]:
    """`make_draft_model(seed=0, gamma=4, acceptance="matching", ids=None, **config changes)`."""
    return random_draft_model


@pytest.fixture(scope="session")
def make_eagle() -> Callable[..., Eagle]:
    """`make_eagle(target, kind="eagle3", seed=1, vocabulary=40, **config changes)`."""
    return random_eagle


@pytest.fixture
def run_step() -> Callable[..., Run]:
    """The eager loop."""
    return generate


@pytest.fixture
def chain() -> Callable[[int], Tree]:
    """Chain trees."""
    return Tree.chain
