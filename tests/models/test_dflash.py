"""DFlash: its forward against the definition, and what every drafter must keep."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.models.beam import best_first, proposed_nodes
from forerun.models.config import RopeConfig
from forerun.models.dflash import DFlash, DFlashConfig, dflash
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.drafter import NORMED, Committed, Drafter, Vocabulary
from forerun.models.grow import prune
from forerun.models.step import Step

SLOTS, HIDDEN, VOCABULARY, MASK = 192, 32, 61, 60
PROMPT = [3, 4, 5, 6, 3, 4, 0, 5, 3, 4]
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "warped": {"temperature": 1.0, "top_p": 0.9, "seed": 11},
}
LAYER = DraftLayerConfig(HIDDEN, 40, 4, 2, 8, 1e-6, SLOTS, RopeConfig(5000.0, 8))
CONFIG = DFlashConfig(LAYER, 2, (1, 2), 5, MASK, budget=16)
VARIANTS = {
    "full": CONFIG,
    "sliding": replace(CONFIG, window=4, sliding_layers=(True, False)),
    "causal": replace(CONFIG, causal_layers=(False, True)),
    "sliding and causal": replace(
        CONFIG, window=3, sliding_layers=(True, True), causal_layers=(True, False)
    ),
    "normed": replace(CONFIG, feature_layers=(0, NORMED)),
}


def draft_weights(config: DFlashConfig, seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    layer = config.layer
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.4

    found = {
        "fc.weight": random(HIDDEN, HIDDEN * len(config.feature_layers)),
        "hidden_norm.weight": 1 + random(HIDDEN),
        "norm.weight": 1 + random(HIDDEN),
    }
    for number in range(config.num_layers):
        shapes = {
            "self_attn.q_proj": (queries, HIDDEN),
            "self_attn.k_proj": (keys, HIDDEN),
            "self_attn.v_proj": (keys, HIDDEN),
            "self_attn.o_proj": (HIDDEN, queries),
            "mlp.gate_proj": (layer.intermediate_size, HIDDEN),
            "mlp.up_proj": (layer.intermediate_size, HIDDEN),
            "mlp.down_proj": (HIDDEN, layer.intermediate_size),
        }
        prefix = f"layers.{number}."
        found |= {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
        for name, size in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", layer.head_dim),
            ("self_attn.k_norm", layer.head_dim),
        ):
            found[f"{prefix}{name}.weight"] = 1 + random(size)
    return found


def make(config: DFlashConfig = CONFIG, seed: int = 1, **changes) -> DFlash:
    config = replace(config, **changes)
    return dflash(config, draft_weights(config, seed), SLOTS)


# --- the forward, from the definition -------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """RoFormer's rotation of a head `[D]`, halves paired."""
    half = len(x) // 2
    angles = position * torch.tensor([5000.0 ** (-i / half) for i in range(half)])
    first, second = x[:half], x[half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def reference(config: DFlashConfig, weights, target, features: Tensor, root: int) -> Tensor:
    """Logits `[gamma, V]` of the block after `features` `[n, F]`: nothing cached, row by row."""
    size, layer = config.block_size, config.layer
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    count = len(context)
    x = target.embed.weight[[root] + [MASK] * (size - 1)]

    def heads(states: Tensor, name: str, gain: str | None, start: int) -> list[list[Tensor]]:
        found = []
        for place, state in enumerate(states):
            row = (weights[f"{name}.weight"] @ state).split(layer.head_dim)
            if gain is not None:
                row = [rotate(norm(head, weights[gain]), start + place) for head in row]
            found.append(list(row))
        return found

    for number in range(config.num_layers):
        prefix = f"layers.{number}.self_attn."
        slides = bool(config.sliding_layers) and config.sliding_layers[number]
        causal = bool(config.causal_layers) and config.causal_layers[number]
        normed = norm(x, weights[f"layers.{number}.input_layernorm.weight"])
        queries = heads(normed, f"{prefix}q_proj", f"{prefix}q_norm.weight", count)
        keys, values = (
            heads(context, f"{prefix}{name}", gain, 0)
            + heads(normed, f"{prefix}{name}", gain, count)
            for name, gain in (("k_proj", f"{prefix}k_norm.weight"), ("v_proj", None))
        )
        mixed = []
        for row in range(size):
            seen = [
                key
                for key in range(count + size)
                if not (causal and key > count + row)
                and not (slides and abs(key - count - row) >= config.window)
            ]
            outputs = []
            for head in range(layer.num_heads):
                pair = head // (layer.num_heads // layer.num_kv_heads)
                scores = torch.stack([queries[row][head] @ keys[key][pair] for key in seen])
                chances = (scores / math.sqrt(layer.head_dim)).softmax(0)
                outputs.append(
                    sum(c * values[key][pair] for c, key in zip(chances, seen, strict=True))
                )
            mixed.append(weights[f"{prefix}o_proj.weight"] @ torch.cat(outputs))
        x = x + torch.stack(mixed)
        prefix = f"layers.{number}.mlp."
        normed = norm(x, weights[f"layers.{number}.post_attention_layernorm.weight"])
        gate, up = (normed @ weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}down_proj.weight"].T
    return norm(x, weights["norm.weight"])[1:] @ target.head.weight


def target_features(target, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """Each token's feature layers `[n, F]`, caught on a plain forward over all of them."""
    from forerun.compiler.certificate import float32_logits

    caught: dict[int, Tensor] = {}

    def enters(number: int):
        return lambda module, inputs: caught.__setitem__(number, inputs[0])

    hooks = [
        *(block.register_forward_pre_hook(enters(n)) for n, block in enumerate(target.blocks)),
        target.norm.register_forward_pre_hook(enters(len(target.blocks))),
        target.norm.register_forward_hook(
            lambda module, inputs, output: caught.__setitem__(NORMED, output)
        ),
    ]
    float32_logits(target, tokens)
    for hook in hooks:
        hook.remove()
    return torch.cat([caught[layer].reshape(len(tokens), -1) for layer in layers], dim=-1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("new", [1, 12])
def test_drafts_are_those_of_the_definition(make_target, run_step, variant, new):
    """After a chunked prefill and some steps, from caches: as from one uncached forward."""
    target, config = make_target(), VARIANTS[variant]
    drafter = make(config, tree=False)
    run = run_step(Step(target, drafter), PROMPT, new, 5, chunk=4)
    text = PROMPT + run.tokens[0]
    features = target_features(target, text[:-1], config.feature_layers)
    with torch.no_grad():
        logits = reference(config, draft_weights(config), target, features, text[-1])
        found = drafter.logits(_committed(text), run.states, target)
    torch.testing.assert_close(found[0], logits, atol=1e-3, rtol=1e-3)
    assert run.last.tokens[0].tolist() == [text[-1], *logits.argmax(-1).tolist()]


def _committed(text: list[int]) -> Committed:
    """What a drafter reads of a step that ended with `text`; the rest is not its business."""
    nothing = torch.zeros(1)
    return Committed(
        tokens=torch.tensor([text]),
        start=torch.tensor([0]),
        count=torch.tensor([len(text) - 1]),
        root=torch.tensor([text[-1]]),
        features=nothing,
        hidden=nothing,
        uniforms=nothing,
        temperature=nothing,
        top_k=nothing,
        top_p=nothing,
        branching=True,
    )


# --- what every drafter keeps ---------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("tree, nodes", [(False, 2), (False, 5), (True, 2), (True, 7), (True, 16)])
def test_tokens_are_the_plain_ones(make_target, run_step, sampling, tree, nodes):
    target = make_target()
    plain = run_step(Step(target, Drafter(), 5), PROMPT, 40, 1, **SAMPLING[sampling])
    for chunk in (None, 3):
        step = Step(target, make(tree=tree))
        drafted = run_step(step, PROMPT, 40, nodes, chunk=chunk, **SAMPLING[sampling])
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_stay_lossless(make_target, run_step, variant):
    target = make_target(window=6, sliding_layers=(True, False))
    plain = run_step(Step(target, Drafter(), 5), PROMPT, 30, 1)
    for tree in (False, True):
        step = Step(target, make(VARIANTS[variant], tree=tree))
        assert run_step(step, PROMPT, 30, 5).tokens == plain.tokens


@pytest.mark.parametrize("tree, nodes", [(False, 5), (True, 5), (True, 12)])
@pytest.mark.parametrize("chunk", [None, 4])
def test_caches_equal_a_fresh_prefill(make_target, run_step, tree, nodes, chunk):
    target = make_target()
    step = Step(target, make(tree=tree))
    run = run_step(step, PROMPT, 30, nodes, chunk=chunk)
    text = PROMPT + run.tokens[0]
    root = int(run.last.length[0] + run.last.pending_count[0])
    assert root == len(text) - 1
    fresh = run_step(step, text[:-1], 1, nodes)
    for found, expected in zip(run.states, fresh.states, strict=True):
        torch.testing.assert_close(found[:, :, :root], expected[:, :, :root], atol=1e-4, rtol=1e-4)
    length = int(run.last.length[0])
    for found, expected in zip(
        run.caches.keys + run.caches.values, fresh.caches.keys + fresh.caches.values, strict=True
    ):
        torch.testing.assert_close(
            found[:, :, :length], expected[:, :, :length], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("tree", [False, True])
def test_trimming_changes_no_tree_that_is_left(make_target, run_step, tree):
    target, small, whole = make_target(), make(tree=tree), make(tree=tree)
    small.trim([1, 3])
    assert small.max_depth() == 2 and small.candidates < whole.candidates
    trimmed, full = (run_step(Step(target, d, 5), PROMPT, 24, 3) for d in (small, whole))
    assert (trimmed.tokens, trimmed.counts) == (full.tokens, full.counts)
    assert torch.equal(trimmed.last.tokens, full.last.tokens)
    assert torch.equal(trimmed.last.depth, full.last.depth)


@pytest.mark.parametrize("tree", [False, True])
def test_rows_of_a_batch_do_not_see_each_other(make_target, run_step, tree):
    prompts = [[3, 4, 5, 6, 3, 4], [9, 9, 1, 0, 2, 9], [7, 0, 0, 7, 0, 0]]
    step = Step(make_target(), make(tree=tree))
    sampling = {"temperature": 0.7, "top_p": 0.95}
    together = run_step(step, prompts, 24, 5, seed=[1, 2, 3], **sampling)
    for row, prompt in enumerate(prompts):
        alone = run_step(step, prompt, 24, 5, seed=row + 1, **sampling)
        assert together.tokens[row] == alone.tokens[0]
        assert together.counts[row] == alone.counts[0]


@pytest.mark.parametrize("tree", [False, True])
def test_a_perfect_block_commits_its_length_and_the_bonus(make_target, run_step, tree):
    target = make_target()
    plain = run_step(Step(target, Drafter(), 5), PROMPT, 41, 1).tokens[0]
    text = torch.tensor(PROMPT + plain + [0] * 8)
    drafter = make(tree=tree)

    def logits(committed: Committed, states: list[Tensor], vocabulary: Vocabulary) -> Tensor:
        ahead = (committed.start + committed.count)[:, None] + torch.arange(1, 5)
        return torch.nn.functional.one_hot(text[ahead], VOCABULARY).float() * 9

    drafter.logits = logits
    run = run_step(Step(target, drafter), PROMPT, 41, 5)
    assert run.tokens[0] == plain
    assert set(run.counts[0][:-1]) == {5}


# --- the tree -------------------------------------------------------------------------------


def by_enumeration(scores: Tensor, nodes: int) -> list[float]:
    """Scores of the best-first tree below the root, by a heap over all open nodes."""
    depths, width = scores.shape
    open_nodes = [(-scores[0, k], (k,)) for k in range(width)]
    heapq.heapify(open_nodes)
    taken = []
    while open_nodes and len(taken) < nodes:
        score, path = heapq.heappop(open_nodes)
        taken.append(-float(score))
        if len(path) < depths:
            for k in range(width):
                heapq.heappush(open_nodes, (score - scores[len(path), k], (*path, k)))
    return taken


@settings(max_examples=1000, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    depths=st.integers(1, 5),
    nodes=st.integers(1, 12),
    sharpness=st.floats(0.1, 8),
    levels=st.sampled_from([0, 0, 3]),
)
def test_the_tree_is_the_best_first_one(seed, depths, nodes, sharpness, levels):
    """Also with ties: `levels` > 0 rounds the log-probabilities, down to many equal ones and 0."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, depths, 14, generator=draw) * sharpness
    scores = logits.log_softmax(-1)
    if levels:
        scores = -(-scores).round().clamp(max=levels)
    best = scores.topk(nodes, dim=-1)
    proposal = best_first(best.values, best.indices)
    assert proposal.tokens.shape == (2, proposed_nodes(depths, nodes))
    for wanted in range(1, nodes + 1):
        root = torch.tensor([40, 41])
        tree = prune(root, proposal, torch.arange(wanted + 1), depths)
        for row in range(2):
            found = _scores_of(tree, row, scores[row], wanted)
            expected = by_enumeration(scores[row], wanted)
            assert sorted(found, reverse=True) == expected[: len(found)]
            assert len(found) == min(wanted, proposal.tokens.shape[1])


def _scores_of(tree, row: int, scores: Tensor, wanted: int) -> list[float]:
    """Each node's score by its own path, after checking that the tree is one."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    depth = tree.depth[row].tolist()
    assert tokens[0] == 40 + row and depth[0] == 0
    assert len({(p, t) for p, t in zip(parents[1:], tokens[1:], strict=True)}) == wanted
    found: list[Tensor] = [torch.tensor(0.0)]
    for node in range(1, wanted + 1):
        parent = parents[node]
        assert parent < node and depth[node] == depth[parent] + 1
        assert tree.ancestors[row, node].tolist() == [
            other == node or bool(tree.ancestors[row, parent, other]) for other in range(wanted + 1)
        ]
        found.append(found[parent] + scores[depth[parent], tokens[node]])
    return [float(score) for score in found[1:]]


def test_a_small_tree_is_the_likeliest_paths():
    scores = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log()
    proposal = best_first(scores, torch.tensor([[[7, 8], [5, 6]]]))
    tree = prune(torch.tensor([1]), proposal, torch.arange(3), 2)
    paths = [tree.tokens[0, tree.ancestors[0, node]].tolist() for node in range(3)]
    assert paths == [[1], [1, 7], [1, 7, 5]]  # 0.6 * 0.9 is more than 0.4


@pytest.mark.slow
def test_smollm2_says_the_same_with_a_random_drafter(run_step, tmp_path):
    pytest.importorskip("gguf")
    from forerun.models.checkpoint import load_checkpoint
    from forerun.models.dflash_folder import dflash_shapes, save_dflash
    from forerun.models.drafters import find_drafter, load_drafter
    from forerun.models.target import Target

    checkpoint = load_checkpoint("smollm2")
    size = checkpoint.config.hidden_size
    layer = replace(LAYER, hidden_size=size, intermediate_size=2 * size, head_dim=64)
    config = replace(CONFIG, layer=layer, feature_layers=(2, 15, 27), mask_token_id=0)
    draw = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(*shape, generator=draw) * 0.05 + ("norm" in name)
        for name, shape in dflash_shapes(config)
        if not name.endswith(".bias")
    }
    save_dflash(tmp_path, config, weights, {"target": checkpoint.name})
    drafter = load_drafter(find_drafter(str(tmp_path)), checkpoint, SLOTS)
    target = Target(checkpoint.config, checkpoint.weights, SLOTS).eval()
    prompt = checkpoint.tokenizer.encode("The capital of France is").ids
    for sampling in ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}):
        plain = run_step(Step(target, Drafter(), 5), prompt, 12, 1, **sampling)
        assert run_step(Step(target, drafter), prompt, 12, 6, **sampling).tokens == plain.tokens
