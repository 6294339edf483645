"""The `forerun` functions' bodies, as ONNX Runtime runs them, against loops and exact sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from forerun.compiler.export import export_functions
from forerun.compiler.functions import DOMAIN, FUNCTIONS, VERSION, Use

RNG = np.random.default_rng
Array = NDArray[Any]


def call(name: str, tensors: list[torch.Tensor], *constants: Any) -> Callable[..., list[Array]]:
    """A graph of that function's node alone, for tensors like these."""
    function = next(function for function in FUNCTIONS if function.name == name)
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="one"), ir_version=11)
    values = [
        ir.val(f"in{i}", ir.tensor_adapters.from_torch_dtype(t.dtype), [None] * t.dim())
        for i, t in enumerate(tensors)
    ]
    node = ir.node(name, values, domain=DOMAIN, num_outputs=function.outputs)
    model.graph.inputs.extend(values)
    model.graph.append(node)
    export_functions(model, {(function, Use.of(function, tensors, constants)): name}, loops=False)
    for place, (output, value) in enumerate(
        zip(node.outputs, model.functions[(DOMAIN, name, "")].outputs, strict=True)
    ):
        output.name, output.dtype, output.shape = f"out{place}", value.dtype, value.shape
    model.graph.outputs.extend(node.outputs)
    assert model.graph.opset_imports[DOMAIN] == VERSION
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())

    def run(*arrays: Array) -> list[Array]:
        feed = {f"in{place}": array for place, array in enumerate(arrays)}
        found: list[Array] = session.run(None, feed)
        return found

    return run


def cut(scaled: Array, top_k: int, top_p: float) -> Array:
    """Probabilities left after top-k, then top-p, in float64; nothing is tied."""
    order = np.argsort(-scaled)
    weights = np.exp(scaled - scaled.max())
    kept = np.zeros_like(weights)
    first = order[: top_k or len(order)]
    kept[first] = weights[first]
    if top_p < 1:
        cumulative = np.cumsum(kept[first])
        kept[first[1:]] *= cumulative[:-1] < top_p * kept.sum()
    return kept / kept.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_token_is_chosen_by_inverse_cdf_or_as_the_largest(dtype: torch.dtype) -> None:
    rows, vocabulary = 3, 300
    examples = [
        torch.zeros(2, rows, vocabulary, dtype=dtype),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(2, rows),
    ]
    run, draw, compared = call("ChooseTokens", examples), RNG(0), 0
    kind = np.float16 if dtype == torch.float16 else np.float32
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 20, 1.0), (1.3, 40, 0.8)):
        for batch in (1, 4):
            logits = draw.normal(0, 3, (batch, rows, vocabulary)).astype(kind)
            uniforms = draw.uniform(0, 1, (batch, rows)).astype(np.float32)
            (found,) = run(
                logits,
                np.full(batch, temperature, np.float32),
                np.full(batch, top_k, np.int64),
                np.full(batch, top_p, np.float32),
                uniforms,
            )
            for b in range(batch):
                for row in range(rows):
                    exact = logits[b, row].astype(np.float64)
                    if temperature == 0:
                        assert found[b, row] == exact.argmax()
                        continue
                    cdf = np.cumsum(cut(exact / temperature, top_k, top_p))
                    near = np.abs(cdf - uniforms[b, row]).min() < 1e-5
                    if not near:  # where rounding can't decide
                        compared += 1
                        assert found[b, row] == np.searchsorted(cdf, uniforms[b, row], "right")
    assert compared > 35


@pytest.mark.parametrize("nodes", [1, 9])
def test_a_path_is_accepted_as_by_walking_down(nodes: int) -> None:
    pending, draw = 6, RNG(1)
    integers, flags = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 3, dtype=torch.bool)
    one = torch.zeros(3, dtype=torch.int64)
    examples = [integers, integers, integers, flags, one, integers, one[:2]]
    run = call("AcceptPath", examples, pending)
    deepest = 0
    for _ in range(40):
        parents = [0] + [int(draw.integers(max(0, i - 3), i)) for i in range(1, nodes)]
        depth, ancestors = [0] * nodes, np.eye(nodes, dtype=bool)
        for node in range(1, nodes):
            depth[node] = depth[parents[node]] + 1
            ancestors[node] |= ancestors[parents[node]]
        if max(depth) >= pending:
            continue
        tokens, chosen = draw.permutation(nodes), draw.integers(0, nodes, nodes)
        for node in range(1, nodes):  # so that paths are deep
            if draw.uniform() < 0.7:
                chosen[parents[node]] = tokens[node]
        allowed = int(draw.integers(0, pending + 1))
        node, path = 0, [0]
        while hits := [
            i for i in range(1, nodes) if parents[i] == node and tokens[i] == chosen[node]
        ]:
            (node,) = hits
            path.append(node)
        deepest = max(deepest, len(path))
        count, emitted, place = run(
            tokens[None],
            chosen[None],
            np.array([depth]),
            ancestors[None],
            np.arange(nodes),
            np.array([parents]),
            np.array([allowed]),
        )
        assert count.tolist() == [min(len(path), allowed)]
        assert emitted[0, : len(path)].tolist() == [int(chosen[i]) for i in path]
        assert place[0].tolist() == path + [-1] * (pending - len(path))
    assert deepest > 2 or nodes == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_committed_by_their_place(dtype: torch.dtype) -> None:
    example = torch.zeros(2, 3, 5, 4, dtype=dtype)
    run = call("CommitRows", [torch.zeros(2, 5, dtype=torch.int64), example])
    kind = np.float16 if dtype == torch.float16 else np.float32
    written = RNG(2).normal(size=(2, 3, 7, 4)).astype(kind)
    node = np.array([[0, 6, 2, -1, -1], [3, -1, -1, -1, -1]])
    (found,) = run(node, written)
    for b, row in enumerate(node):
        for place, at in enumerate(row):
            expected = np.zeros((3, 4), kind) if at < 0 else written[b, :, at]
            np.testing.assert_array_equal(found[b, :, place], expected)


def test_nodes_attend_to_what_is_committed_and_to_their_ancestors() -> None:
    """A softmax over just those slots, one node and one head after the other, in float64."""
    heads, kv_heads, slots, dim, nodes = 4, 2, 40, 8, 7
    query, cache = torch.zeros(2, heads, 3, dim), torch.zeros(2, kv_heads, slots, dim)
    lengths, bits = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, 1, dtype=torch.int64)
    run = call("TreeAttention", [query, cache, cache, lengths, lengths, bits], 0.3)
    draw = RNG(3)
    query, keys, values = (
        draw.normal(size=(2, size, n, dim)).astype(np.float32)
        for size, n in ((heads, nodes), (kv_heads, slots), (kv_heads, slots))
    )
    committed, first = np.array([0, 20]), np.array([3, 25])
    ancestors = np.tril(draw.uniform(size=(2, nodes, nodes)) < 0.5) | np.eye(nodes, dtype=bool)
    words = (ancestors * (1 << np.arange(nodes))).sum(-1)[:, :, None]
    (found,) = run(query, keys, values, committed, first, words)
    for b in range(2):
        for node in range(nodes):
            seen = [*range(committed[b]), *(first[b] + np.flatnonzero(ancestors[b, node]))]
            for head in range(heads):
                k, v = (cache[b, head // 2, seen].astype(np.float64) for cache in (keys, values))
                scores = np.exp(k @ query[b, head, node] * 0.3)
                exact = scores @ v / scores.sum()
                np.testing.assert_allclose(found[b, head, node], exact, rtol=1e-5, atol=1e-6)
