"""Every node of a step says which part it belongs to, by what is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from forerun.runtime.parts import ACCEPT, COMMIT, DRAFT, OTHER, PARTS, VERIFY, part_of

ir = pytest.importorskip("onnx_ir")


def all_nodes(graph: Any) -> Iterable[Any]:
    for node in graph:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from all_nodes(attribute.as_graph())


def needed(graph: Any, outputs: Iterable[str]) -> set[str]:
    """Names of the outer nodes that these outputs need, by a walk of its own over names."""
    makers = {value.name: node for node in graph for value in node.outputs}
    seen: set[str] = set()
    open_names = list(outputs)
    while open_names:
        node = makers.get(open_names.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        for inner in [node, *all_nodes_of(node)]:
            open_names += [value.name for value in inner.inputs if value is not None]
    return seen


def all_nodes_of(node: Any) -> Iterable[Any]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from all_nodes(attribute.as_graph())


@pytest.mark.parametrize("bundle", ["tiny_bundle", "tiny_medusa_bundle", "tiny_combined_bundle"])
def test_every_node_is_attributed(bundle: str, request: pytest.FixtureRequest) -> None:
    graph = ir.load(request.getfixturevalue(bundle) / "model.onnx").graph
    parts = {part_of(node.name) for node in all_nodes(graph)}
    assert parts == set(PARTS)
    names = [node.name for node in all_nodes(graph)]
    assert len(names) == len(set(names))
    for node in graph:  # what is inside a branch or a loop is of its part
        assert {part_of(inner.name) for inner in all_nodes_of(node)} <= {part_of(node.name)}


@pytest.mark.parametrize("bundle", ["tiny_bundle", "tiny_combined_bundle"])
def test_a_part_is_what_its_outputs_need(bundle: str, request: pytest.FixtureRequest) -> None:
    graph = ir.load(request.getfixturevalue(bundle) / "model.onnx").graph
    caches = [f"new_{kind}_{layer}" for kind in ("keys", "values") for layer in range(2)]
    verify = needed(graph, ["logits", *caches])
    accept = needed(graph, ["emitted", "count", "next_length"])
    commit = needed(graph, ["next_pending"])
    scatters = {node.name for node in graph if any(v.name in caches for v in node.outputs)}
    assert len(scatters) == 4
    for node in graph:
        if node.name in scatters:
            expected = COMMIT
        elif node.name in verify:
            expected = VERIFY
        elif node.name in accept:
            expected = ACCEPT
        else:
            expected = COMMIT if node.name in commit else DRAFT
        assert part_of(node.name) == expected
    products = [node for node in graph if node.op_type == "MatMul"]
    assert (
        sum(part_of(node.name) == VERIFY for node in products) >= 13
    )  # two layers of six, and the head
    assert any(part_of(n.name) == ACCEPT for n in graph if n.op_type in ("If", "Loop"))  # sampling
    assert any(part_of(n.name) == DRAFT for n in graph if n.op_type == "If")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("verify/node_matmul_3_kernel_time", VERIFY),
        ("node_matmul_3", OTHER),
        ("", OTHER),
        ("fused verify/a + draft/b", VERIFY),
        ("{ForeignNode[draft/a...accept/b]}", DRAFT),
        ("[ONNX Layer: commit/node_TensorScatter_9]", COMMIT),
        ("Transpose_token_7_verify", OTHER),
    ],
)
def test_the_part_in_a_name(name: str, part: str) -> None:
    assert part_of(name) == part


def test_plain_bundles_have_no_drafter(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from forerun.models.drafter import Drafter

    graph = ir.load(make_bundle(tmp_path, Drafter, [1]) / "model.onnx").graph
    draft = [node for node in graph if part_of(node.name) == DRAFT]
    assert all(part_of(node.name) != OTHER for node in all_nodes(graph))
    assert not any(node.op_type in ("MatMul", "If") for node in draft)


def test_nodes_of_functions_are_of_the_part_that_calls_them(
    tiny_target: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from forerun.compiler.export import export_step
    from forerun.models.ngram import NGram
    from forerun.models.step import Step
    from forerun.models.target import Target

    config, weights = tiny_target
    step = Step(Target(config, weights, 256), NGram(7, 4, 1), 8)
    step.branching = False  # as for TensorRT
    export_step(step, tmp_path / "model.onnx", {"slots": 256}, loops=False)
    model = ir.load(tmp_path / "model.onnx")
    assert {part_of(node.name) for node in all_nodes(model.graph)} == set(PARTS)
    expected = {"ChooseTokens": ACCEPT, "AcceptPath": ACCEPT, "CommitRows": COMMIT}
    called = {name: function for (_, name, _), function in model.functions.items()}
    for name, part in expected.items():
        assert {part_of(node.name) for node in called[name]} == {part}
