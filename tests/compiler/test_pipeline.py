"""Compiling a tiny checkpoint: what comes out is lossless, whole, and not made twice."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from forerun.compiler import pipeline  # noqa: E402
from forerun.compiler.options import CompileOptions  # noqa: E402
from forerun.compiler.pipeline import compile_bundle  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.models.checkpoint import load_checkpoint  # noqa: E402
from forerun.models.medusa import MedusaConfig  # noqa: E402
from forerun.models.medusa_folder import save_medusa  # noqa: E402
from forerun.runtime.batch import Job, decode_batch  # noqa: E402
from forerun.runtime.bundle import load_bundle  # noqa: E402
from forerun.runtime.engine import Request, load_engine  # noqa: E402
from forerun.runtime.loop import decode  # noqa: E402
from forerun.runtime.sampling import SamplingParams  # noqa: E402
from forerun.runtime.verify import VerifyConfig, verify  # noqa: E402

PARAMS = [SamplingParams(), SamplingParams(0.8, seed=3), SamplingParams(1.0, 40, 0.9, seed=4)]


@pytest.fixture(scope="module")
def medusa_folder(tmp_path_factory, tiny_checkpoint_folder):
    """Random Medusa heads of two layers over a reduced vocabulary."""
    folder = tmp_path_factory.mktemp("drafter") / "heads"
    hidden = load_checkpoint(tiny_checkpoint_folder).config.hidden_size
    generator = torch.Generator().manual_seed(0)
    tensors = {"ids": torch.arange(0, 200)}
    for head in range(3):
        for layer in range(2):
            name = f"{head}.{layer}.linear"
            tensors[f"{name}.weight"] = torch.randn(hidden, hidden, generator=generator) * 0.1
            tensors[f"{name}.bias"] = torch.randn(hidden, generator=generator) * 0.1
    config = MedusaConfig(3, 2, hidden, 4, tuple((0.4, 0.2, 0.1, 0.05) for _ in range(3)))
    save_medusa(folder, config, tensors, {})
    return folder


@pytest.fixture(scope="module")
def options(tmp_path_factory, tiny_checkpoint_folder):
    return CompileOptions(
        target=str(tiny_checkpoint_folder),
        output=tmp_path_factory.mktemp("bundles") / "ngram-int8",
        capacity=1024,
        trees=(4, 8),
    )


@pytest.fixture(scope="module")
def int8_bundle(options):
    compiled = compile_bundle(options)
    assert not compiled.reused
    return compiled.path


@pytest.fixture(scope="module")
def medusa_bundle(options, medusa_folder):
    made = replace(
        options, drafter=str(medusa_folder), trees=(12,), output=options.output.with_name("medusa")
    )
    return compile_bundle(made).path


def tokens(engine, prompt, nodes, params, new=48):
    out = engine.prefill(Request(prompt, len(prompt) + new, params), nodes)
    while committed := engine.step(nodes)[0]:
        out += committed
    return out


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("which", ["int8_bundle", "medusa_bundle"])
def test_speculative_tokens_equal_plain_ones_under_int8(request, which, params):
    engine = load_engine(load_bundle(request.getfixturevalue(which)))
    sizes = [int(nodes) for nodes in engine.manifest.trees if nodes != "1"]
    for start in range(6):
        prompt = [(7 * start + 3 * i) % 11 + 60 for i in range(20 + 9 * start)]
        plain = tokens(engine, prompt, 1, params)
        for nodes in sizes:
            assert tokens(engine, prompt, nodes, params) == plain


def test_a_row_is_bit_equal_however_many_rows_there_are(int8_bundle):
    engine = load_engine(load_bundle(int8_bundle))
    text = [(5 * i * i + 3) % 250 for i in range(300)]  # over a cache bucket's border
    whole = engine.score(text)
    for chunk in (1, 2, 5, 8):
        np.testing.assert_array_equal(engine.score(text[:270], chunk)[:270], whole[:270])


@pytest.mark.parametrize("which", ["int8_bundle", "medusa_bundle"])
def test_neighbours_in_a_batch_change_no_token_under_int8(request, which):
    """Where one row's rounding saw another's, tokens would soon differ."""
    bundle = load_bundle(request.getfixturevalue(which))
    alone, engine = load_engine(bundle), load_engine(bundle, rows=3)
    nodes = int(bundle.manifest.default_tree)
    work = [
        Job(Request([(7 * i + 3 * j) % 11 + 60 for j in range(5 + 9 * i)], 100, PARAMS[i % 3]))
        for i in range(7)
    ]
    found: dict[int, list[int]] = {number: [] for number in range(len(work))}
    for event in decode_batch(engine, work, nodes):
        found[event.number] += event.outcome.tokens
    for number, job in enumerate(work):
        blocks = decode(alone, job.request, 1)
        assert found[number] == [token for block in blocks for token in block.tokens]


def test_the_certificate_passes(int8_bundle):
    certificate = verify(int8_bundle, VerifyConfig(limit=3, tokens=16))
    assert certificate.passed
    checked = {check.name for check in certificate.checks if check.passed}
    assert len(checked) >= 4


def test_the_same_recipe_is_not_compiled_again(options, int8_bundle):
    before = (int8_bundle / "manifest.json").stat().st_mtime_ns
    assert compile_bundle(options).reused
    assert (int8_bundle / "manifest.json").stat().st_mtime_ns == before


def test_a_damaged_bundle_is_not_taken_for_the_same(options, int8_bundle, monkeypatch):
    copy = options.output.with_name("damaged")
    copy.mkdir()
    for file in int8_bundle.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    data = copy / "model.onnx.data"
    data.write_bytes(b"x" + data.read_bytes()[1:])
    monkeypatch.setattr(pipeline, "_build", _stop(RuntimeError("compiled again")))
    with pytest.raises(RuntimeError, match="compiled again"):
        compile_bundle(replace(options, output=copy))


def _stop(error: BaseException):
    def build(*args):
        (args[3] / "half-done").write_text("x")
        raise error

    return build


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
)
def test_an_interruption_keeps_the_old_bundle_and_leaves_nothing(
    options, int8_bundle, monkeypatch, error
):
    monkeypatch.setattr(pipeline, "_build", _stop(error))
    expected = ForerunError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        compile_bundle(replace(options, capacity=1280))
    load_bundle(int8_bundle)
    assert not list(int8_bundle.parent.glob(".*"))


def test_what_a_killed_run_left_is_removed(tmp_path, options, monkeypatch):
    (tmp_path / ".new.999999999.partial").mkdir()
    ours = tmp_path / f".new.{os.getppid()}.partial"  # a living process's own
    ours.mkdir()
    monkeypatch.setattr(pipeline, "_build", _stop(ForerunError("stop here")))
    with pytest.raises(ForerunError, match="stop here"):
        compile_bundle(replace(options, output=tmp_path / "new"))
    assert list(tmp_path.iterdir()) == [ours]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "nobody"}, "neither a folder"),
        ({"trees": (40,)}, "at most 8"),
        ({"engine": "cuda"}, "choose one of"),
        ({"precision": "fp16"}, "choose one of int8, fp32"),
        ({"capacity": 300}, "raise --capacity"),
        ({"target": "/nowhere"}, "nowhere"),
    ],
)
def test_bad_requests_are_one_clear_line(tmp_path, options, changes, message):
    with pytest.raises(ForerunError, match=message) as caught:
        compile_bundle(replace(options, output=tmp_path / "out", **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_bundle_is_left_alone(tmp_path, options):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ForerunError, match="no bundle"):
        compile_bundle(replace(options, output=tmp_path))
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_fp32_agrees_with_eager_torch(tmp_path, options):
    """`check_onnx` compares inside the pipeline: a float32 compile that ends has passed it."""
    path = compile_bundle(
        replace(options, output=tmp_path / "fp32", precision="fp32", trees=(8,))
    ).path
    engine = load_engine(load_bundle(path))
    prompt = [60, 61, 62, 60, 61, 62, 60]
    assert tokens(engine, prompt, 8, PARAMS[0]) == tokens(engine, prompt, 1, PARAMS[0])


def test_a_wrong_export_is_caught(tmp_path, options, monkeypatch):
    """The check sees a graph whose weights differ from the torch step's."""
    real = pipeline.export_step

    def spoiled(step, path, *rest):
        facts = real(step, path, *rest)
        with torch.no_grad():
            step.target.blocks[1].down.weight.mul_(1.5)
        return facts

    monkeypatch.setattr(pipeline, "export_step", spoiled)
    with pytest.raises(ForerunError, match="torch step"):
        compile_bundle(replace(options, output=tmp_path / "bad", precision="fp32", trees=(8,)))
