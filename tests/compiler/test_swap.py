"""A swapped bundle is what compiling the new drafter gives; a failed swap changes nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from click.testing import CliRunner  # noqa: E402

from forerun.cli import main  # noqa: E402
from forerun.compiler.options import ENGINE_KINDS, CompileOptions  # noqa: E402
from forerun.compiler.pipeline import compile_bundle  # noqa: E402
from forerun.compiler.swap import SwapOptions, swap_drafter  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.models.config import RopeConfig  # noqa: E402
from forerun.models.draft_layer import DraftLayerConfig  # noqa: E402
from forerun.models.eagle import EagleConfig  # noqa: E402
from forerun.models.eagle_folder import save_eagle  # noqa: E402
from forerun.models.medusa import MedusaConfig  # noqa: E402
from forerun.models.medusa_folder import save_medusa  # noqa: E402
from forerun.runtime.bundle import load_bundle  # noqa: E402
from forerun.runtime.engine import Request, load_engine  # noqa: E402
from forerun.runtime.loop import decode  # noqa: E402
from forerun.runtime.sampling import SamplingParams  # noqa: E402
from forerun.runtime.verify import VerifyConfig, verify  # noqa: E402

HIDDEN, HEADS = 48, 3
PARAMS = (SamplingParams(), SamplingParams(0.8, seed=3))
EVEN = ((0.4, 0.2, 0.1, 0.05),) * HEADS


def medusa(folder: Path, seed: int, accuracy: Any = EVEN, layers: int = 1, ids: int = 200) -> Path:
    """Random Medusa heads over a vocabulary of their own, other tokens with every seed."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {"ids": torch.randperm(260, generator=draw)[:ids]}
    for head in range(len(accuracy)):
        for layer in range(layers):
            name = f"{head}.{layer}.linear"
            tensors[f"{name}.weight"] = torch.randn(HIDDEN, HIDDEN, generator=draw) * 0.1
            tensors[f"{name}.bias"] = torch.randn(HIDDEN, generator=draw) * 0.1
    config = MedusaConfig(len(accuracy), layers, HIDDEN, 4, accuracy)
    save_medusa(folder, config, tensors, {})
    return folder


def eagle3(folder: Path, seed: int) -> Path:
    """A random layer; its norms are all ones, as they are before training."""
    draw = torch.Generator().manual_seed(seed)
    layer = DraftLayerConfig(HIDDEN, 40, 6, 2, 8, 1e-5, 2048, RopeConfig(5000.0 * seed, 8))
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "layers.0.self_attn.q_proj": (48, 2 * HIDDEN),
        "layers.0.self_attn.k_proj": (16, 2 * HIDDEN),
        "layers.0.self_attn.v_proj": (16, 2 * HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, 48),
        "layers.0.mlp.gate_proj": (40, HIDDEN),
        "layers.0.mlp.up_proj": (40, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, 40),
        "lm_head": (100, HIDDEN),
    }
    norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
    tensors = {
        **{f"{name}.weight": torch.randn(*s, generator=draw) * 0.3 for name, s in shapes.items()},
        **{f"{name}.weight": torch.ones(HIDDEN) for name in norms},
        "layers.0.post_attention_layernorm.weight": torch.full((HIDDEN,), 0.5 + seed),
        "d2t": torch.randperm(260, generator=draw)[:100].sort().values - torch.arange(100),
    }
    save_eagle(folder, EagleConfig(layer, (0, 1, 2), depth=3, top_k=3), tensors, {})
    return folder


def draft(folder: Path, seed: int, checkpoint: Path) -> Path:
    """The tiny target's sizes and tokenizer with other weights, some of the target's mixed in so
    that drafts are accepted now and then."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    draw = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    noisy = {n: w + 0.05 * torch.randn(w.shape, generator=draw) for n, w in weights.items()}
    save_file(noisy, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory, tiny_checkpoint_folder) -> Callable[[str, int], str]:
    """`make(kind, seed)`: the folder of a random drafter, or its name with `+ngram`."""
    root = tmp_path_factory.mktemp("drafters")

    def drafter(kind: str, seed: int) -> str:
        base = kind.removesuffix("+ngram")
        folder = root / f"{base}-{seed}"
        if not folder.exists():
            if base == "draft":
                draft(folder, seed, tiny_checkpoint_folder)
            else:
                {"medusa": medusa, "eagle3": eagle3}[base](folder, seed)
        return f"{folder}{kind.removeprefix(base)}"

    return drafter


@pytest.fixture(scope="module")
def options(tmp_path_factory, tiny_checkpoint_folder) -> CompileOptions:
    root = tmp_path_factory.mktemp("bundles")
    return CompileOptions(
        str(tiny_checkpoint_folder), root / "bundle", precision="fp32", capacity=512, trees=(4, 6)
    )


@pytest.fixture(scope="module")
def compiled(options, make) -> Path:
    """The first Medusa drafter in fp32."""
    return compile_bundle(replace(options, drafter=make("medusa", 1))).path


@pytest.fixture
def bundle(tmp_path, compiled) -> Path:
    """A copy that a test may change."""
    shutil.copytree(compiled, tmp_path / "bundle")
    return tmp_path / "bundle"


def swap(bundle: Path, drafter: str, options: CompileOptions, output: Path | None = None) -> Any:
    return swap_drafter(SwapOptions(bundle, drafter, options.target, output))


def graph(bundle: Path) -> tuple[dict[str, np.ndarray], list[bytes]]:
    """The ONNX graph's weights by name, and its nodes; read by the onnx package."""
    path = bundle / load_bundle(bundle).manifest.engine.graph
    model = onnx.load(path)
    weights = {w.name: onnx.numpy_helper.to_array(w) for w in model.graph.initializer}
    _forget_origins(model.graph)
    return weights, [node.SerializeToString(deterministic=True) for node in model.graph.node]


def _forget_origins(graph: Any) -> None:
    """Away with the exporter's notes on where in torch each node comes from."""
    for node in graph.node:
        del node.metadata_props[:]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _forget_origins(attribute.g)


def same_weights(one: Path, other: Path) -> set[str]:
    """The names of the weights that are equal bit for bit; both graphs have the same ones."""
    (first, nodes), (second, same_nodes) = graph(one), graph(other)
    assert nodes == same_nodes
    assert list(first) == list(second)
    return {
        name
        for name, weight in first.items()
        if weight.dtype == second[name].dtype
        and weight.shape == second[name].shape
        and weight.tobytes() == second[name].tobytes()
    }


def answers(bundle: Path) -> list[Any]:
    """Every block of some answers, plain and speculative, greedy and sampled."""
    engine = load_engine(load_bundle(bundle), threads=1)
    return [
        [
            [block.tokens for block in decode(engine, Request(prompt, 90, params), nodes)]
            for nodes in map(int, engine.manifest.trees)
        ]
        for prompt in ([(7 * i) % 11 + 60 for i in range(30)], [65, 66, 67] * 5)
        for params in PARAMS
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- the same as compiling ----------------------------------------------------------------------

SLOW = pytest.mark.slow  # two compilations each
CASES = [
    ("medusa", "fp32"),
    *(
        pytest.param(kind, precision, marks=SLOW)
        for kind in ("medusa", "eagle3", "draft", "medusa+ngram")
        for precision in ("fp32", "int8")
        if (kind, precision) != ("medusa", "fp32")
    ),
]


@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_a_swapped_bundle_is_the_compiled_one(tmp_path, options, make, kind, precision):
    trees = (3,) if kind == "draft" else options.trees  # each drafted token is a model's copy
    chosen = replace(options, precision=precision, trees=trees)
    first, wanted = (
        compile_bundle(
            replace(chosen, drafter=make(kind, seed), output=tmp_path / f"compiled-{seed}")
        ).path
        for seed in (1, 2)
    )
    before = load_bundle(first).manifest
    names = set(graph(first)[0])
    other = names - same_weights(first, wanted)
    assert other and all(name.startswith("step.drafter.") for name in other)

    swapped = swap(first, make(kind, 2), options)
    assert swapped.changed
    assert same_weights(first, wanted) == names
    after, fresh = load_bundle(first).manifest, load_bundle(wanted).manifest
    assert after.drafter == fresh.drafter != before.drafter
    assert (after.recipe, after.trees) == (fresh.recipe, fresh.trees)
    for name in ("model.onnx.data", "golden.safetensors", "tokenizer.json", "drafter.json"):
        assert after.files[name] == before.files[name]
    assert len(after.files) == len(fresh.files) == len(list(first.iterdir())) - 1

    found = answers(first)
    assert found == answers(wanted)
    for runs in found:
        plain, *speculative = ([t for block in run for t in block] for run in runs)
        assert all(run == plain for run in speculative)


def test_it_is_certified_and_inspected_and_up_to_date(bundle, options, make):
    wanted = make("medusa", 2)
    arguments = [str(bundle), "--drafter", wanted, "--target", options.target]
    done = CliRunner().invoke(main, ["swap", *arguments])
    assert done.exit_code == 0 and "now drafts with medusa-2" in done.stdout
    assert verify(bundle, VerifyConfig(limit=2, tokens=16)).passed
    shown = CliRunner().invoke(main, ["inspect", str(bundle)])
    assert "medusa-2 (medusa)" in shown.stdout
    before = content(bundle)
    again = CliRunner().invoke(main, ["swap", *arguments, "--json"])
    assert json.loads(again.stdout)["drafter"]["name"] == "medusa-2"
    assert content(bundle) == before
    kept = compile_bundle(replace(options, drafter=wanted, output=bundle))
    assert kept.reused  # nothing is left to compile


def test_there_and_back_gives_the_same_weights(bundle, compiled, options, make):
    swap(bundle, make("medusa", 2), options)
    swap(bundle, make("medusa", 1), options)
    assert same_weights(bundle, compiled) == set(graph(compiled)[0])
    assert load_bundle(bundle).manifest.recipe == load_bundle(compiled).manifest.recipe


def test_into_another_bundle(bundle, tmp_path, options, make):
    before, out = content(bundle), tmp_path / "out"
    assert swap(bundle, make("medusa", 2), options, out).path == out
    assert content(bundle) == before
    swap(bundle, make("medusa", 2), options)
    assert content(out) == content(bundle)
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "out"}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(ForerunError, match="no bundle"):
        swap(bundle, make("medusa", 1), options, tmp_path / "notes")


def test_trees_of_other_heads_and_choices_are_made_of_what_was_compiled(bundle, tmp_path, options):
    """By itself this drafter would want a chain of three heads' first choices and more."""
    deep = medusa(tmp_path / "deep", 5, ((0.9, 0.02, 0.01, 0.005),) * HEADS)
    lines: list[str] = []
    old = load_bundle(bundle).manifest
    swapped = swap_drafter(SwapOptions(bundle, str(deep), options.target), lines.append)
    new = swapped.manifest
    assert new.drafter.options == old.drafter.options and new.pending == old.pending
    assert any("are kept" in line for line in lines)
    before = content(bundle)
    assert not swap(bundle, str(deep), options).changed and content(bundle) == before
    for size, tree in new.trees.items():
        assert tree is not None and tree.nodes == int(size) and tree.depth < new.pending
    for runs in answers(bundle):
        plain, *speculative = ([t for block in run for t in block] for run in runs)
        assert all(run == plain for run in speculative)


# --- refused ------------------------------------------------------------------------------------


def edit(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def refused(bundle: Path, drafter: str, target: str | None) -> str:
    """The one line with which the swap is refused; the bundle stays as it was."""
    before = content(bundle)
    with pytest.raises(ForerunError) as caught:
        swap_drafter(SwapOptions(bundle, drafter, target))
    assert content(bundle) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_drafter_of_another_kind_or_form_is_refused(bundle, tmp_path, options, make):
    target = options.target
    assert "of kind ngram, the bundle's of kind medusa" in refused(bundle, "ngram", target)
    assert "kind medusa+ngram" in refused(bundle, make("medusa", 2) + "+ngram", target)
    assert "kind eagle3" in refused(bundle, make("eagle3", 2), target)
    layers = medusa(tmp_path / "layers", 2, layers=2)
    assert "config.layers is 2, not 1: compile" in refused(bundle, str(layers), target)
    short = medusa(tmp_path / "short", 2, ids=100)
    assert "ids is int64 [100], not int64 [200]" in refused(bundle, str(short), target)
    heads = medusa(tmp_path / "heads", 2, EVEN[:1])
    assert "a tree of 6 nodes is out of reach" in refused(bundle, str(heads), target)
    assert "neither a folder" in refused(bundle, "nobody", target)


def test_another_target_is_refused(bundle, tmp_path, options, make):
    other = draft(tmp_path / "other", 1, Path(options.target))
    assert "another target" in refused(bundle, make("medusa", 2), str(other))
    assert "--target" in refused(bundle, make("medusa", 2), None)


def test_bundles_that_have_nothing_to_swap_are_refused(bundle, options, make):
    wanted, target = make("medusa", 2), options.target
    assert "no such folder" in _error(bundle.with_name("none"), wanted, target)
    edit(bundle, lambda manifest: manifest.update(contract=1))
    assert "step contract 1" in refused(bundle, wanted, target)
    edit(bundle, lambda manifest: manifest.update(contract=2))
    edit(bundle, lambda manifest: manifest["drafter"].update(kind="ngram"))
    assert "no weights to swap" in refused(bundle, "ngram", target)
    edit(bundle, lambda manifest: manifest["drafter"].update(kind="medusa"))
    edit(bundle, lambda manifest: manifest["engine"].update(kind="tensorrt-rtx"))
    assert "compile it again with --refit" in refused(bundle, wanted, target)


def _error(bundle: Path, drafter: str, target: str) -> str:
    with pytest.raises(ForerunError) as caught:
        swap_drafter(SwapOptions(bundle, drafter, target))
    return str(caught.value)


def test_a_refittable_engine_needs_its_gpu(monkeypatch, tmp_path, options, make):
    """The engine here is no engine: nothing that TensorRT can't load is replaced."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    # The graph's weights lie as they do in one that is made for TensorRT.
    monkeypatch.setitem(ENGINE_KINDS, "ort", replace(ENGINE_KINDS["ort"], transposed=True))
    drafter = make("medusa", 1)
    bundle = compile_bundle(replace(options, output=tmp_path / "bundle", drafter=drafter)).path
    edit(bundle, lambda manifest: manifest["engine"].update(kind="tensorrt-rtx", refit=True))
    assert "can't load it here" in refused(bundle, make("medusa", 2), options.target)


def test_two_swaps_at_once_are_refused(bundle, options, make):
    import fcntl

    handle = os.open(bundle, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert "another swap" in refused(bundle, make("medusa", 2), options.target)
    finally:
        os.close(handle)


# --- interrupted --------------------------------------------------------------------------------

GROWING = ("os.mkdir", "os.rename", "os.truncate")
CHANGES = (*GROWING, "os.remove", "os.rmdir")


def in_a_fork(
    work: Callable[[], Any], at: int, failure: Callable[[], None], events: tuple[str, ...]
) -> int:
    """Runs `work` in a process of its own, in which `failure` happens instead of the `at`th change
    to the file system: a file opened for writing, or one of `events`.

    -> its status: 0 done, 1 a ForerunError, 2 anything else, 5 no such change, 9 killed.
    """
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event in events or (
            event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        )
        if writes:
            count += 1
            if count == at:
                failure()

    status = 2
    try:
        sys.addaudithook(watch)
        work()
        status = 0 if count >= at else 5
    except ForerunError:
        status = 1
    finally:
        os._exit(status)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed() -> None:
    os._exit(9)


@pytest.mark.parametrize("how", ["killed", "disk full"])
def test_an_interruption_anywhere_leaves_the_old_bundle_or_the_new_one(
    tmp_path, compiled, options, make, how
):
    # What a full disk refuses is less than what a kill may come before.
    failure, events = (full, GROWING) if how == "disk full" else (killed, CHANGES)
    drafters = [make("medusa", 1), make("medusa", 2)]
    seen: list[str] = []
    for at in range(1, 100):
        bundle = tmp_path / "bundle"
        shutil.copytree(compiled, bundle)
        status = in_a_fork(lambda: swap(bundle, drafters[1], options), at, failure, events)  # noqa: B023
        if status == 5:  # that many changes are not made
            break
        name = load_bundle(bundle).manifest.drafter.name  # every file is as the manifest says
        seen.append(name)
        if how == "disk full":
            assert (status, name) in ((0, "medusa-2"), (1, "medusa-1"))
            assert not list(bundle.glob(".*")) and not list(bundle.glob("*.partial"))
        else:
            assert status == 9
        swapped = swap(bundle, drafters[seen[-1] == "medusa-1"], options)
        swap(bundle, drafters[swapped.manifest.drafter.name == "medusa-1"], options)
        listed = load_bundle(bundle).manifest.files
        assert {path.name for path in bundle.iterdir()} == {*listed, "manifest.json"}
        shutil.rmtree(bundle)
    assert 5 < len(seen) < 99 and "medusa-1" in seen
    if how == "killed":
        assert seen == sorted(seen) and "medusa-2" in seen  # old, ..., old, new, ...: never back
