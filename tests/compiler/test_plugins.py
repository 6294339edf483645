"""Everything about a plugin but handing it to TensorRT: nodes, arguments, grids, shapes, PTX."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from forerun.compiler.check import check_onnx
from forerun.compiler.export import export_step
from forerun.compiler.functions import DOMAIN, FUNCTIONS, Recorder, Use
from forerun.compiler.kernels import build_kernel
from forerun.compiler.launch import Size
from forerun.compiler.plans import PLANS, run_kernels
from forerun.compiler.plugins import (
    Limits,
    Plan,
    engine_ptx,
    kernels_of,
    plans_for,
    with_kernels,
)
from forerun.errors import ForerunError
from forerun.models.accept import accept_nodes
from forerun.models.choose import choice
from forerun.models.expand import best_columns, best_nodes
from forerun.models.grow import best_tree
from forerun.models.growing import as_growing
from forerun.models.linear import Linear
from forerun.models.medusa import Medusa, MedusaConfig
from forerun.models.step import Step, rows_at
from forerun.models.target import Target
from forerun.models.tree_attention import attend, pack_ancestors

LIMITS = Limits(nodes=16, slots=96)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def chain(batch: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Depths, ancestors, parents of a chain."""
    places = torch.arange(nodes)
    ancestors = torch.ones(nodes, nodes).tril().bool()
    return (
        places.expand(batch, -1).contiguous(),
        ancestors.expand(batch, -1, -1).contiguous(),
        (places - 1).clamp(min=0).expand(batch, -1).contiguous(),
    )


def choosing(batch: int, nodes: int) -> tuple[list[torch.Tensor], list[Any]]:
    logits = draw(batch, nodes, 300) * 3
    temperature = torch.linspace(0, 1.5, batch)
    top_k, top_p = torch.full((batch,), 20), torch.full((batch,), 0.9)
    uniform = torch.rand(batch, nodes, generator=torch.Generator().manual_seed(0))
    return [logits, temperature, top_k, top_p, uniform], []


def accepting(batch: int, nodes: int) -> tuple[list[torch.Tensor], list[Any]]:
    depth, ancestors, parents = chain(batch, nodes)
    chosen = torch.arange(1, nodes + 1).expand(batch, -1).contiguous()
    tokens = chosen.roll(1, 1)
    tokens[0, nodes // 2] = 77  # row 0 breaks off there
    allowed = torch.full((batch,), 9)
    return [tokens, chosen, depth, ancestors, torch.arange(nodes), parents, allowed], [20]


def committing(batch: int, nodes: int) -> tuple[list[torch.Tensor], list[Any]]:
    node = torch.tensor([[0, nodes - 1, -1]]).expand(batch, -1).contiguous()
    return [node, draw(batch, 12, nodes, 8)], []


def attending(batch: int, nodes: int) -> tuple[list[torch.Tensor], list[Any]]:
    query, cache = draw(batch, 6, nodes, 16), [draw(batch, 2, 96, 16) for _ in range(2)]
    committed = torch.arange(batch) * 30
    bits = pack_ancestors(chain(batch, nodes)[1])
    return [query, *cache, committed, committed + 2, bits], [0.25]


def expanding(batch: int, nodes: int) -> tuple[list[torch.Tensor], list[Any]]:
    scores = -draw(batch, nodes).abs()
    places = torch.arange(nodes).expand(batch, -1).contiguous()
    return [draw(batch, nodes, 5000), scores, places], [min(nodes, 3)]


def keeping(batch: int, nodes: int) -> tuple[list[torch.Tensor], list[Any]]:
    level = nodes * nodes
    tokens = torch.arange(7, 7 + level).expand(batch, -1).contiguous()
    return [tokens, draw(batch, level).mul(2).round().div(2)], [11, nodes]


def pruning(batch: int, nodes: int) -> tuple[list[torch.Tensor], list[Any]]:
    proposed = 3 * nodes
    parents = torch.arange(proposed) // 2  # a node's children follow it
    scores = torch.zeros(batch, proposed + 1)
    for place in range(proposed):
        scores[:, place + 1] = scores[:, parents[place]] - draw(batch, proposed + 1)[:, place].abs()
    tokens = torch.arange(50, 50 + proposed).expand(batch, -1).contiguous()
    root = torch.arange(batch)
    shape = [root, tokens, parents.expand(batch, -1).contiguous(), scores[:, 1:].contiguous()]
    return [*shape, torch.arange(nodes)], [8]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ChooseTokens": (choosing, choice),
    "AcceptPath": (accepting, accept_nodes),
    "CommitRows": (committing, rows_at),
    "TreeAttention": (attending, attend),
    "ExpandColumns": (expanding, best_columns),
    "KeepNodes": (keeping, best_nodes),
    "PruneTree": (pruning, best_tree),
}


def plan_of(name: str, batch: int = 2, nodes: int = 5) -> Plan:
    tensors, constants = CASES[name][0](batch, nodes)
    function = next(function for function in FUNCTIONS if function.name == name)
    return PLANS[name](Use.of(function, tensors, constants), LIMITS)


def test_every_function_is_planned_and_tried_here() -> None:
    assert set(PLANS) == set(CASES) == {function.name for function in FUNCTIONS}


@pytest.mark.parametrize("batch, nodes", [(1, 1), (2, 5), (3, 16)])
@pytest.mark.parametrize("name", CASES)
def test_launched_as_an_engine_would_it_is_the_function(
    name: str, batch: int, nodes: int, interpreted: Callable[..., Any]
) -> None:
    """Argument order, grid, integers and the outputs' shapes: all as the plan says."""
    tensors, constants = CASES[name][0](batch, nodes)
    expected = CASES[name][1](*tensors, *constants)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    found = interpreted(run_kernels, name, tensors, constants, LIMITS)
    assert [t.shape for t in found] == [t.shape for t in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_each_operation_runs_eagerly(name: str, batch: int, nodes: int) -> None:
    """torch refuses an operation's output that is a view of its input, which small sizes make."""
    function = next(function for function in FUNCTIONS if function.name == name)
    tensors, constants = CASES[name][0](batch, nodes)
    expected = function.meaning(*tensors, *constants)
    found = function.operation(*tensors, *constants)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        assert torch.equal(one, other)


class Symbol:
    """A size as TensorRT has it: arithmetic with a number or another one on the right, no more."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __add__(self, other: Size) -> Symbol:
        return Symbol(self.value + int(other))

    def __sub__(self, other: Size) -> Symbol:
        return Symbol(self.value - int(other))

    def __mul__(self, other: Size) -> Symbol:
        return Symbol(self.value * int(other))

    def __floordiv__(self, other: Size) -> Symbol:
        return Symbol(self.value // int(other))

    def __int__(self) -> int:
        return self.value


@pytest.mark.parametrize("name", CASES)
def test_sizes_may_be_an_engines_symbols(name: str) -> None:
    tensors, _ = CASES[name][0](3, 7)
    plan = plan_of(name)
    shapes = {n: tuple(t.shape) for n, t in zip(plan.inputs, tensors, strict=True)}
    for kernel in kernels_of(name, plan):
        given = [shapes[name] for name in kernel.launch.inputs]
        launch, made = kernel.sized(given)
        symbolic, also = kernel.sized([[Symbol(size) for size in shape] for shape in given])
        assert [int(size) for size in symbolic.grid] == [int(size) for size in launch.grid]
        numbers = {name: int(size) for name, size in symbolic.integers.items()}
        assert numbers == {name: int(size) for name, size in launch.integers.items()}
        assert [[int(size) for size in shape] for shape in also] == [list(s) for s in made]
        shapes |= dict(zip(launch.outputs, made, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_body_of_kernels_computes_every_output_from_what_is_there(name: str) -> None:
    plan, function = plan_of(name), next(f for f in FUNCTIONS if f.name == name)
    inputs = [ir.val(f"a{place}") for place in range(len(function.inputs))]
    empty = ir.Graph(inputs, [ir.val("x")] * function.outputs, nodes=[], opset_imports={"": 24})
    body = ir.Function(DOMAIN, name, graph=empty, attributes=[])
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}), ir_version=11)
    model.functions[body.identifier()] = body
    kernels = with_kernels(model, {name: plan})
    (made,) = model.functions.values()
    assert [node.op_type for node in made] == [kernel.name for kernel in kernels]
    known = set(made.inputs)
    for node in made:
        assert node.domain == node.attributes["plugin_namespace"].as_string() == DOMAIN
        assert set(node.inputs) <= known
        known |= set(node.outputs)
    assert len(made.inputs) == len(function.inputs) and len(made.outputs) == function.outputs
    assert set(made.outputs) <= known


@pytest.mark.parametrize("name", CASES)
def test_the_ptx_takes_just_what_the_engine_passes(name: str, tmp_path: Path) -> None:
    from triton import knobs

    for kernel in kernels_of(name, plan_of(name)):
        launch = kernel.launch
        binary = build_kernel(launch.form, 89)
        ptx = engine_ptx(binary, len(launch.arguments))
        (head,) = re.findall(rf"\.entry {binary.name}\(([^)]*)\)", ptx)
        kinds = re.findall(r"\.param \.(\w+)", head)
        integers = [name in launch.integers for name in launch.arguments]
        assert kinds == ["u32" if integer else "u64" for integer in integers]
        (tmp_path / "kernel.ptx").write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-arch=sm_89", "kernel.ptx", "-o", "kernel.cubin"]
        subprocess.run(command, cwd=tmp_path, check=True)
        with pytest.raises(ForerunError, match="arguments"):
            engine_ptx(binary, len(launch.arguments) - 1)


def test_a_whole_step_takes_its_kernels(tiny_target: Any, tmp_path: Path) -> None:
    """As the pipeline exports for an engine with plugins: attention by the tree's bits, the tree
    grown on the device. The file itself runs anywhere; with kernels, where they are known."""
    config, weights = tiny_target
    target = Target(config, weights, 96, attention="tree")
    accuracy = ((0.5, 0.2, 0.1),) * 2
    width, ids = config.hidden_size, torch.arange(0, config.vocab_size, 2)
    blocks = [[Linear(draw(width, width), draw(width))] for _ in range(2)]
    heads = [Linear(draw(width, len(ids)))]
    medusa = Medusa(MedusaConfig(2, 1, width, 3, accuracy), blocks, heads, ids)
    step = Step(target, as_growing(medusa)).eval()
    step.branching = False
    path, recorder = tmp_path / "step.onnx", Recorder()
    facts = export_step(step, path, {"slots": 96}, False, recorder)
    assert check_onnx(step, facts, path, list(range(3, 30)), 6, "fp32") < 1e-4
    called = {"ChooseTokens", "AcceptPath", "CommitRows", "TreeAttention", "PruneTree"}
    assert set(recorder.uses.values()) == called
    model = ir.load(path)
    kernels = with_kernels(model, plans_for(recorder.uses, LIMITS, PLANS))
    assert len({kernel.name for kernel in kernels}) == len(kernels) >= len(called)
    ir.save(model, tmp_path / "plugins.onnx")
    again = ir.load(tmp_path / "plugins.onnx")
    nodes = [node.op_type for function in again.functions.values() for node in function]
    assert sorted(nodes) == sorted(kernel.name for kernel in kernels)
    for kernel in kernels:
        engine_ptx(build_kernel(kernel.launch.form, 89), len(kernel.launch.arguments))
