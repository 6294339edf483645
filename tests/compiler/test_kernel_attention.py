"""The kernel of tree attention: in Triton's interpreter against the op, and built for every GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from forerun.compiler.kernel_attention import (  # noqa: E402
    AttentionForm,
    Tiles,
    attention_launches,
    choose_tiles,
    tree_attention,
)
from forerun.compiler.kernels import CAPABILITIES, build_kernel  # noqa: E402
from forerun.models.tree_attention import TreeView, pack_ancestors  # noqa: E402
from forerun.models.tree_attention import tree_attention as reference  # noqa: E402

SHARED = 99 * 1024
"""Bytes of shared memory that a block may have on sm_86, sm_89 and sm_120."""
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PENDING = 5
Interpreted = Callable[..., Any]


def tree(nodes: int, draw: torch.Generator) -> Tensor:
    """Ancestors `[T, T]` of a random tree."""
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 9), node, (1,), generator=draw))
        ancestors[node] |= ancestors[parent]
    return ancestors


def case(
    nodes: int,
    group: int,
    dim: int,
    slots: int,
    lengths: list[int],
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
    pending: int = PENDING,
    cache: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Arguments of the op up to `bits`; what no node sees is NaN or huge."""
    draw = torch.Generator().manual_seed(nodes * 1000 + group * 100 + dim)
    batch = len(lengths)
    query = torch.randn(batch, kv_heads * group, nodes, dim, generator=draw).to(dtype)
    keys, values = (
        torch.randn(batch, kv_heads, slots, dim, generator=draw).to(cache or dtype)
        for _ in range(2)
    )
    length = torch.tensor(lengths)
    committed = length + torch.randint(0, pending + 1, (batch,), generator=draw)
    ancestors = torch.stack([tree(nodes, draw) for _ in lengths])
    view = TreeView(committed, length + pending, ancestors)
    mask = view.mask(slots)
    for row in range(batch):
        unseen = (~mask[row].any(0)).nonzero()[:, 0]
        for tensor in (keys, values):
            tensor[row, :, unseen[::2]] = float("nan")
            tensor[row, :, unseen[1::2]] = 400.0 if cache else 6e4
    return query, keys, values, committed, view.first, pack_ancestors(ancestors)


def full(slots: int, nodes: int, pending: int = PENDING) -> int:
    """The length whose tree ends with the cache."""
    return slots - pending - nodes


def assert_equal(
    interpreted: Interpreted, tensors: tuple[Tensor, ...], scale: float, tiles: Tiles | None
) -> None:
    found = interpreted(tree_attention, *tensors, scale, tiles)
    query, keys, values, *where = tensors
    expected = reference(query.float(), keys.float(), values.float(), *where, scale)
    assert found.dtype == query.dtype and found.isfinite().all()
    near = TOLERANCE[query.dtype]
    torch.testing.assert_close(found.float(), expected, atol=near, rtol=near)


@pytest.mark.parametrize(
    ("nodes", "group", "dim", "tiles"),
    [
        (1, 1, 64, Tiles(16, 16, 1, 4)),
        (1, 4, 128, Tiles(16, 32, 5, 4)),
        (5, 3, 32, Tiles(16, 16, 4, 4)),
        (8, 4, 64, Tiles(32, 32, 3, 4)),
        (8, 4, 24, Tiles(16, 16, 64, 4)),
        (64, 1, 32, Tiles(64, 32, 2, 8)),
        (65, 3, 64, Tiles(64, 64, 1, 8)),
        (130, 1, 128, Tiles(64, 32, 7, 8)),
        (256, 3, 32, Tiles(128, 64, 2, 8)),
    ],
)
def test_interpreted_equals_the_op(interpreted, nodes, group, dim, tiles):
    """Rows of length 0, of some length, and at full capacity, side by side."""
    slots = nodes + 120
    heads = 1 if nodes > 100 else 2  # of keys: the interpreter is slow
    tensors = case(nodes, group, dim, slots, [0, 53, full(slots, nodes)], kv_heads=heads)
    assert_equal(interpreted, tensors, dim**-0.5, tiles)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "group", "dim"), [(1, 4, 64), (8, 4, 128), (70, 1, 32)])
def test_half_precision_and_chosen_tiles(interpreted, dtype, nodes, group, dim):
    tensors = case(nodes, group, dim, 200, [0, 77, full(200, nodes)], dtype)
    assert_equal(interpreted, tensors, dim**-0.5, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_fp8_cache_is_widened(interpreted, dtype):
    tensors = case(6, 2, 32, 90, [0, 40], dtype, cache=torch.float8_e4m3fn)
    assert_equal(interpreted, tensors, 32**-0.5, Tiles(16, 16, 3, 4))


@pytest.mark.parametrize("parts", [1, 4])
def test_the_smallest_row_and_the_fullest(interpreted, parts):
    """Nothing committed, nothing pending, one node; and a single node in the last slot."""
    for slots, length in ((1, 0), (64, 0), (64, 63), (65, 64)):
        tensors = case(1, 2, 16, slots, [length], pending=0)
        assert_equal(interpreted, tensors, 0.25, Tiles(16, 16, parts, 4))


@pytest.mark.parametrize("parts", [1, 3])
def test_large_scores_lose_nothing(interpreted, parts):
    """Scores of thousands, all whole numbers, a few apart: exact in float32 in any order."""
    draw = torch.Generator().manual_seed(1)
    query, keys, values, *where = case(5, 2, 16, 80, [0, 60])
    query = torch.randint(-8, 9, query.shape, generator=draw).float()
    whole = torch.randint(-60, 61, keys.shape, generator=draw).float()
    keys = torch.where(keys.isnan(), keys, whole)
    assert_equal(interpreted, (query, keys, values, *where), 1.0, Tiles(16, 16, parts, 4))
    assert_equal(interpreted, (query * 64, keys, values, *where), 1.0, Tiles(16, 16, parts, 4))


@pytest.mark.parametrize("parts", [1, 3])
def test_tied_scores_share_alike(interpreted, parts):
    query, keys, values, committed, first, bits = case(5, 2, 16, 80, [0, 60])
    keys = torch.where(keys.isnan(), keys, 1.0)
    found = interpreted(
        *(tree_attention, query, keys, values, committed, first, bits, 0.25),
        Tiles(16, 16, parts, 4),
    )
    for row, node in product(range(2), range(5)):
        kin = [first[row] + other for other in range(5) if int(bits[row, node, 0]) >> other & 1]
        seen = [*range(int(committed[row])), *map(int, kin)]
        mean = values[row][:, seen].mean(1).repeat_interleave(2, 0)  # [h, D]
        torch.testing.assert_close(found[row, :, node], mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_node_that_sees_nothing_gets_zeros(interpreted, parts):
    query, keys, values, _, first, bits = case(3, 1, 16, 40, [0, 9])
    nothing = torch.zeros(2, dtype=torch.int64)
    bits[:, 1] = 0
    tensors = (query, keys, values, nothing, first, bits)
    assert_equal(interpreted, tensors, 0.25, Tiles(16, 16, parts, 4))
    assert not interpreted(tree_attention, *tensors, 0.25, Tiles(16, 16, parts, 4))[:, :, 1].any()


def test_tiles_keep_the_processors_busy():
    form = AttentionForm(32, 8, 128, 128**-0.5, "fp16", "fp16")
    for batch, nodes, slots in product((1, 4, 64), (1, 8, 64, 256), (64, 4096, 131072)):
        tiles = choose_tiles(form, batch, nodes, slots)
        (first, *_) = attention_launches(form, tiles, batch, nodes, slots)
        programs = first.grid[0] * first.grid[1] * first.grid[2]
        assert first.grid[0] * tiles.rows >= 4 * nodes
        assert tiles.parts in (1, 64) or programs >= 264 or tiles.parts * tiles.block * 2 >= slots
        assert tiles.parts == 1 or programs < 2 * 264  # no more parts than that takes


def test_sizes_may_be_an_engines_symbols():
    sympy = pytest.importorskip("sympy")  # torch brings it
    form, tiles = AttentionForm(8, 2, 64, 0.125, "fp16", "fp16"), Tiles(16, 64, 4, 4)
    batch, nodes = sympy.symbols("batch nodes", integer=True, positive=True)
    open_, sized = (
        attention_launches(form, tiles, b, t, 512) for b, t in ((batch, nodes), (3, 13))
    )
    for one, other in zip(open_, sized, strict=True):
        values = {batch: 3, nodes: 13}
        assert [sympy.sympify(axis).subs(values) for axis in one.grid] == list(other.grid)
        assert one.form == other.form and one.arguments == other.arguments
    names = [launch.form.function.arg_names for launch in sized]
    for launch, order in zip(sized, names, strict=True):
        assert [name for name in order if name in launch.arguments] == list(launch.arguments)
    assert sized[0].grid == (4, 4, 6) and sized[1].grid == (13 * 8, 3, 1)


def forms(
    element: str, nodes: int, dim: int, cache: str | None = None, batch: int = 1
) -> list[Any]:
    """Those of an 8B-shaped target's layer (32 query heads, 8 of keys), or of another `dim`."""
    form = AttentionForm(32, 8, dim, dim**-0.5, element, cache or element)
    tiles = choose_tiles(form, batch, nodes, 4096)
    return list(attention_launches(form, tiles, batch, nodes, 4096))


def built(launches: list[Any], capability: int, title: str) -> None:
    for launch in launches:
        binary = build_kernel(launch.form, capability)
        print(
            f"{binary.name} sm_{capability} {title}: {binary.registers} registers, "
            f"{binary.spilled} bytes spilled, {binary.shared} bytes shared, {binary.warps} warps"
        )
        assert binary.cubin.startswith(b"\x7fELF")
        assert binary.spilled == 0
        assert binary.shared <= SHARED
        (parameters,) = re.findall(r"\.entry \w+\((.*?)\)", binary.ptx, re.DOTALL)
        scratch = 2  # Triton's own, at the end
        assert parameters.count(".param") == len(launch.arguments) + scratch


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_for_every_gpu(capability):
    built(forms("fp16", 8, 128), capability, "fp16 T 8 D 128")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("element", ["fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_it_compiles_without_spilling(element, dim, capability):
    for nodes in (1, 8, 16, 64):
        built(forms(element, nodes, dim), capability, f"{element} T {nodes} D {dim}")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_other_types_and_sizes_compile_without_spilling(capability):
    (single,) = forms("fp16", 8, 128, batch=64)  # enough programs without parts
    built([single], capability, "fp16 T 8 D 128 B 64")
    built(forms("fp16", 64, 80), capability, "fp16 T 64 D 80")
    if capability >= 89:  # the first to know that type
        built(forms("fp16", 64, 128, "fp8e4nv"), capability, "fp8 cache T 64 D 128")
