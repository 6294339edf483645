"""Attention by a tree's bits: against a loop over each node's slots, and within the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from forerun.models.drafter import Drafter
from forerun.models.ngram import NGram
from forerun.models.step import Step
from forerun.models.tree_attention import (
    TreeView,
    pack_ancestors,
    tree_attention,
    unpack_ancestors,
)
from forerun.training.read import read_alike

PROMPT = [3, 4, 5, 6, 3, 4, 0, 5, 3, 4]
SIZES = [1, 5, 63, 64, 65, 130, 256]


def random_ancestors(batch: int, nodes: int) -> Tensor:
    """Any relation in which a node sees itself."""
    draw = torch.Generator().manual_seed(nodes)
    return (torch.rand(batch, nodes, nodes, generator=draw) < 0.5) | torch.eye(nodes).bool()


@pytest.mark.parametrize("nodes", SIZES)
def test_words_hold_a_bit_a_node(nodes):
    ancestors = random_ancestors(2, nodes)
    bits = pack_ancestors(ancestors)
    assert bits.shape == (2, nodes, -(-nodes // 64)) and bits.dtype == torch.int64
    for row in range(2):
        for node in range(nodes):
            unsigned = [word % (1 << 64) for word in bits[row, node].tolist()]
            whole = sum(word << (64 * place) for place, word in enumerate(unsigned))
            expected = [bool(whole >> other & 1) for other in range(nodes)]
            assert ancestors[row, node].tolist() == expected
            assert whole >> nodes == 0
    assert torch.equal(unpack_ancestors(bits), ancestors)


class Packed(nn.Module):
    def forward(self, ancestors: Tensor) -> Tensor:
        return pack_ancestors(ancestors)


def test_words_are_packed_by_standard_onnx_ops_of_any_size(tmp_path: Path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    import onnx
    from torch.export import Dim

    from forerun.compiler.export import TRANSLATIONS

    nodes = Dim("nodes", min=2, max=1 << 20)
    shapes = ({0: Dim("batch", min=2, max=1 << 20), 1: nodes, 2: nodes},)
    program = torch.export.export(
        Packed(), (random_ancestors(3, 5),), dynamic_shapes=shapes, strict=False
    )
    path = tmp_path / "pack.onnx"
    torch.onnx.export(
        program,
        dynamo=True,
        opset_version=24,
        custom_translation_table=dict(TRANSLATIONS),
        verbose=False,
    ).save(path)
    assert {node.domain for node in onnx.load(path).graph.node} <= {"", "ai.onnx"}
    session = onnxruntime.InferenceSession(path)
    (name,) = (value.name for value in session.get_inputs())
    for size in SIZES:
        ancestors = random_ancestors(2, size)
        (bits,) = session.run(None, {name: ancestors.numpy()})
        assert bits.tolist() == pack_ancestors(ancestors).tolist()


def by_hand(
    query: Tensor, keys: Tensor, values: Tensor, view: TreeView, scale: float
) -> tuple[Tensor, list[list[list[int]]]]:
    """Softmax over a list of slots for each node, in float64; and those lists."""
    batch, heads, nodes, _ = query.shape
    group = heads // keys.shape[1]
    out, lists = torch.zeros_like(query, dtype=torch.float64), []
    for row in range(batch):
        committed, first = int(view.committed[row]), int(view.first[row])
        seen = [
            [*range(committed)]
            + [first + kin for kin in range(nodes) if view.ancestors[row, node, kin]]
            for node in range(nodes)
        ]
        lists.append(seen)
        for head in range(heads):
            for node in range(nodes):
                k = keys[row, head // group, seen[node]].double()
                v = values[row, head // group, seen[node]].double()
                weights = (k @ query[row, head, node].double() * scale).softmax(0)
                out[row, head, node] = weights @ v
    return out, lists


@pytest.mark.parametrize("nodes", [1, 5, 65])
@pytest.mark.parametrize("group", [1, 3])
def test_each_node_sees_what_is_committed_and_its_ancestors(nodes, group):
    draw = torch.Generator().manual_seed(nodes)
    slots, pending = 90, 4
    query = torch.randn(3, 2 * group, nodes, 8, generator=draw)
    keys, values = torch.randn(2, 3, 2, slots, 8, generator=draw)
    length = torch.tensor([0, 7, slots - pending - nodes])  # the last one: full capacity
    view = TreeView(
        length + torch.tensor([0, 3, pending]), length + pending, random_ancestors(3, nodes)
    )
    expected, lists = by_hand(query, keys, values, view, 0.3)
    mask = view.mask(slots)
    for row in range(3):
        assert [mask[row, node].nonzero()[:, 0].tolist() for node in range(nodes)] == lists[row]
        unseen = ~mask[row].any(0)
        keys[row, :, unseen] = float("nan")
        values[row, :, unseen] = float("nan")
    bits = pack_ancestors(view.ancestors)
    found = tree_attention(query, keys, values, view.committed, view.first, bits, 0.3)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def steps(make_target, make_medusa, kind: str, **changes) -> tuple[Step, Step]:
    """The same step with the form "tree" and with "fused"."""
    made = []
    for attention in ("tree", "fused"):
        target = make_target(attention=attention, **changes)
        drafter = {
            "plain": lambda: Drafter(),
            "ngram": lambda: NGram(7, 4, 1),
            "medusa": lambda target=target: make_medusa(target),
        }[kind]()
        made.append(Step(target, drafter, None if kind != "plain" else 4))
    return made[0], made[1]


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_heads": 4}, {"num_kv_heads": 1}, {"window": 6, "sliding_layers": (True, False)}],
    ids=["groups", "no groups", "one group", "windows"],
)
@pytest.mark.parametrize(("kind", "nodes"), [("plain", 1), ("ngram", 8), ("medusa", 13)])
def test_a_step_says_what_it_says_with_the_masked_form(
    make_target, make_medusa, run_step, kind, nodes, changes
):
    tree, masked = steps(make_target, make_medusa, kind, **changes)
    ours, theirs = (run_step(step, PROMPT, 30, nodes, chunk=4) for step in (tree, masked))
    assert ours.tokens == theirs.tokens and ours.counts == theirs.counts
    with torch.no_grad():
        logits = [
            step(run.last, run.caches, run.states)[0].logits
            for step, run in ((tree, ours), (masked, theirs))
        ]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "drawn"])
def test_rows_of_a_batch_stay_apart(make_target, make_medusa, run_step, sampling):
    prompts = [[3, 4, 5, 6, 3, 4], [9, 9, 1, 0, 2, 9], [7, 0, 0, 7, 0, 0]]
    tree, masked = steps(make_target, make_medusa, "medusa")
    together = run_step(tree, prompts, 30, 13, **sampling)
    assert together.tokens == run_step(masked, prompts, 30, 13, **sampling).tokens
    lengths = {len(counts) for counts in together.counts}
    assert len(lengths) > 1  # the rows did move on by different numbers of tokens


def test_a_plain_mask_is_taken_too(make_target):
    texts = [[3, 4, 5, 6, 9], [3, 4, 1]]
    hidden = [
        read_alike(make_target(attention=attention), texts).rest.hidden
        for attention in ("tree", "fused")
    ]
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)
