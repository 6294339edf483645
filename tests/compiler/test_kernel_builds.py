"""Every kernel of a step's small work, compiled for every architecture (`-s` prints the sizes)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from forerun.compiler.kernel_accept import accept_launch
from forerun.compiler.kernel_choose import choose_launch
from forerun.compiler.kernel_commit import commit_launch
from forerun.compiler.kernel_expand import best_of_blocks_launch, children_launch, keep_launch
from forerun.compiler.kernel_grow import in_order_launch, link_launch
from forerun.compiler.kernels import CAPABILITIES, build_kernel
from forerun.compiler.launch import Launch

VOCABULARIES = (49_152, 128_256, 151_936)
SHARED = 99 * 1024
"""Bytes of shared memory a block that the smallest of the architectures (sm_86, sm_89) has."""


def typical() -> dict[str, Launch]:
    """One of each kernel."""
    return {
        "choose, V 151936, fp16": choose_launch(1, 64, 151_936, "fp16"),
        "accept, R 64": accept_launch(1, 64, 64, 9, 64),
        "commit, D 64, fp16": commit_launch(1, 180, 64, 9, 64, "fp16"),
        "best_of_blocks, V 151936, k 10, fp16": best_of_blocks_launch(10, 151_936, 10, "fp16"),
        "children, V 151936, k 10": children_launch(10, 151_936, 10, False),
        "keep, k 10": keep_launch(1, 100, 11, 10),
        "in_order, M 710, N 64": in_order_launch(1, 710, 64, 64),
        "link, N 64": link_launch(1, 710, 64, 64, 8),
    }


def others() -> Iterator[tuple[str, Launch]]:
    """The sizes and types besides."""
    for vocabulary in VOCABULARIES:
        for dtype in ("fp32", "fp16", "bf16"):
            yield f"choose, V {vocabulary}, {dtype}", choose_launch(1, 8, vocabulary, dtype)
            name = f"best_of_blocks, V {vocabulary}, k 10, {dtype}"
            yield name, best_of_blocks_launch(10, vocabulary, 10, dtype)
        yield f"children, V {vocabulary}, k 10", children_launch(10, vocabulary, 10, False)
    yield "choose, V 260, fp32", choose_launch(1, 8, 260, "fp32")
    yield "best_of_blocks, V 32000, k 32, fp16", best_of_blocks_launch(32, 32_000, 32, "fp16")
    yield "children, V 32000, k 32, ids", children_launch(32, 32_000, 32, True)
    yield "children, V 151936, k 32", children_launch(32, 151_936, 32, False)
    yield "keep, k 32", keep_launch(1, 1024, 33, 32)
    for rows in (1, 8, 256):
        yield f"accept, R {rows}", accept_launch(1, rows, rows, 17, rows)
        yield f"in_order, M 710, N {rows}", in_order_launch(1, 710, rows, rows)
        yield f"link, N {rows}", link_launch(1, 710, rows, rows, 8)
    for dtype in ("fp32", "bf16", "u8"):
        for width in (64, 80, 128):
            yield f"commit, D {width}, {dtype}", commit_launch(1, 64, 64, 9, width, dtype)


def check(name: str, launch: Launch, capability: int) -> None:
    binary = build_kernel(launch.form, capability)
    print(
        f"{name} | sm_{capability} | {binary.warps} warps | {binary.registers} registers | "
        f"{binary.shared} bytes shared | {binary.spilled} spilled"
    )
    assert binary.spilled == 0, name
    assert binary.shared <= SHARED, name
    assert len(binary.cubin) > 0
    parameters = re.findall(r"\.param \.(\w+)(?: \.ptr)?", entry(binary.ptx))
    expected = [
        "u64" if launch.form.types[argument].startswith("*") else "u32"
        for argument in launch.arguments
    ]
    assert parameters == [*expected, "u64", "u64"], name  # Triton's two scratch pointers


def entry(ptx: str) -> str:
    found = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_kernel_compiles(capability):
    for name, launch in typical().items():
        check(name, launch, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_sizes_compile(capability):
    for name, launch in others():
        check(name, launch, capability)


@pytest.mark.parametrize("name", typical())
def test_arguments_are_in_the_order_in_which_the_kernel_takes_them(name):
    launch = typical()[name]
    taken = [
        argument for argument in launch.form.function.arg_names if argument in launch.form.types
    ]
    assert tuple(taken) == launch.arguments == tuple(launch.form.types)
    left = set(launch.form.function.arg_names) - set(taken)
    assert left == set(launch.form.constants)


class Symbol:
    """An engine's size that isn't known before it runs; it allows no more than plugins' do."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _with(self, sign: str, other: object) -> Symbol:
        return Symbol(f"({self.text} {sign} {other})")

    def __mul__(self, other: object) -> Symbol:
        return self._with("*", other)

    def __add__(self, other: object) -> Symbol:
        return self._with("+", other)

    def __sub__(self, other: object) -> Symbol:
        return self._with("-", other)

    def __floordiv__(self, other: object) -> Symbol:
        return self._with("//", other)


def test_grids_may_be_symbols():
    batch, rows = Symbol("B"), Symbol("T")
    assert str(choose_launch(batch, rows, 49_152, "fp16").grid) == "((B * T), 1, 1)"
    commit = commit_launch(batch, 180, rows, 9, 64, "fp16")
    assert str(commit.grid) == "(B, 102, 1)" and str(commit.integers) == "{'G': 180, 'T': T}"
    assert str(accept_launch(batch, rows, rows, 9, 64).grid) == "(B, 1, 1)"
    assert str(link_launch(batch, 710, rows, 64, 8).grid) == "(B, T, 1)"
    assert str(best_of_blocks_launch(batch, 49_152, 10, "fp16").grid) == "(B, 12, 1)"
    assert keep_launch(batch, rows, 11, 10).integers["M"] is rows
