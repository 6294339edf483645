"""Every node's name says which part of the step it belongs to: `verify/...`, `draft/...`.

Engines' profilers report time by names that derive from these, whatever they fuse. A part is what
the step's outputs need that no earlier part computes, so it holds for every drafter and needs
nothing that the exporter says of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from forerun.models.signature import cache_names
from forerun.runtime.parts import ACCEPT, COMMIT, DRAFT, VERIFY, named

LOGITS = "logits"
CHOSEN = ("emitted", "count", "next_length")
KEPT = ("next_pending",)


def name_parts(model: ir.Model, layers: int) -> None:
    """Prefix the nodes of a step's graph, the target's `layers` deep, and those inside them.

    A function's nodes are of the part that calls it first.
    """
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    caches = cache_names(layers, "new_")
    found: dict[ir.Node, str] = {}
    # The target's caches are written by the step that reads them: commit, though verify needs it.
    _claim(found, COMMIT, (outputs[name].producer() for name in caches))
    for part, names in (
        (VERIFY, (LOGITS, *caches)),
        (ACCEPT, CHOSEN),
        (COMMIT, KEPT),
        (DRAFT, tuple(outputs)),
    ):
        _claim(found, part, _needed(outputs[name] for name in names))
    functions = dict(model.functions)
    for node in graph:
        _rename(node, found[node], functions)


def _claim(found: dict[ir.Node, str], part: str, nodes: Iterable[ir.Node | None]) -> None:
    """`nodes` belong to `part`, unless an earlier one has them."""
    for node in nodes:
        if node is not None:
            found.setdefault(node, part)


def _needed(values: Iterable[ir.Value]) -> set[ir.Node]:
    """The graph's nodes that `values` are computed by."""
    needed: set[ir.Node] = set()
    open_values = list(values)
    while open_values:
        node = open_values.pop().producer()
        if node is not None and node not in needed:
            needed.add(node)
            open_values += _read(node)
    return needed


def _read(node: ir.Node) -> list[ir.Value]:
    """What a node reads, in its own graph and, from graphs inside it, around them."""
    read = [value for value in node.inputs if value is not None]
    for inner in _inside(node):
        read += _read(inner)
    return read


def _inside(node: ir.Node) -> Iterable[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph()


def _rename(node: ir.Node, part: str, functions: dict[Any, ir.Function]) -> None:
    """Name it and what is in it; functions that it calls are taken out of `functions`."""
    node.name = named(part, node.name or node.op_type)
    called = functions.pop(node.op_identifier(), ())
    for inner in (*_inside(node), *called):
        _rename(inner, part, functions)
