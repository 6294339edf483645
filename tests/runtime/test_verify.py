"""The certificate: it passes on a good bundle, and tells what is wrong with a bad one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from forerun.errors import ForerunError
from forerun.runtime import numerics
from forerun.runtime.bundle import load_bundle, write_manifest
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.engine_ort import OrtEngine
from forerun.runtime.manifest import EngineFacts, Manifest
from forerun.runtime.numerics import Check, kl, margin, tolerances
from forerun.runtime.sampling import SamplingParams, uniforms
from forerun.runtime.verify import Certificate, VerifyConfig, table, verify

FEW = VerifyConfig(limit=2, tokens=12, threads=1)
TOKENS = [*range(40)]


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle with golden and reference files."""
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    logits = load_engine(load_bundle(tiny_bundle), threads=1).score(TOKENS)
    save_file({"tokens": np.array(TOKENS, np.int64), "logits": logits}, copy / "golden.safetensors")
    logprobs = log_softmax(logits)
    ids = np.argsort(-logprobs, axis=-1)[:, :64]
    reference = {
        "tokens": np.array([TOKENS], np.int64),
        "start": np.array([30], np.int64),
        "length": np.array([39], np.int64),
        "ids": ids[None].astype(np.int32),
        "logprobs": np.take_along_axis(logprobs, ids, 1)[None].astype(np.float32),
    }
    save_file(reference, copy / "reference.safetensors")
    rewrite(copy)
    return copy


def rewrite(folder: Path, **changes: Any) -> None:
    """The manifest again, once files or facts have changed."""
    text = (folder / "manifest.json").read_text()
    write_manifest(folder, replace(Manifest.from_json(text), **changes))


def found(certificate: Certificate) -> dict[str, Check]:
    return {check.name: check for check in certificate.checks}


def test_a_good_bundle(folder: Path) -> None:
    ticks: list[None] = []
    certificate = verify(folder, FEW, lambda: ticks.append(None))
    checks = found(certificate)
    assert certificate.passed and len(ticks) == 4
    assert checks["files"].facts["files"] == len(load_bundle(folder).manifest.files)
    assert checks["engine"].facts == {"kind": "ort", "run": True}
    assert checks["golden"].facts["top1_agreement"] == 1.0
    assert checks["golden"].facts["max_difference"] < 1e-4
    agreement = checks["float32 agreement"].facts
    assert agreement["positions"] == 9 and agreement["top1_agreement"] == 1.0
    assert abs(agreement["kl"]) < 1e-6
    for name in ("greedy", "sampled"):
        facts = checks[f"losslessness, {name}"].facts
        assert (facts["prompts"], facts["identical"], facts["different"]) == (2, 2, 0)
    assert checks["repeated runs"].facts == {"runs": 4, "equal": 4}
    rows = checks["row independence"]
    assert rows.facts["rows"] == 40 and list(rows.facts["different"]) == ["4", "8", "40"]
    assert rows.facts["max_difference"] < 1e-4
    written = json.loads(json.dumps(certificate.to_dict()))
    assert written["passed"] is True and written["checks"]["golden"]["passed"] is True
    assert written["bundle"]["hash"] == "tiny"


def test_the_table_says_it_to_people() -> None:
    from rich.console import Console

    about = {"path": "x/y", "target": "t", "drafter": "d", "engine": "e", "precision": "p"}
    place = {"cpu": "a cpu", "cores": 2}
    checks = (Check("one", True, "good"), Check("two", False, "bad"), Check("three", None, "not"))
    certificate = Certificate({**about, "hash": "abc"}, place, {}, checks)
    assert not certificate.passed
    console = Console(width=100)
    with console.capture() as text:
        console.print(table(certificate))
    for word in ("y: t, d, e p", "one", "ok", "FAILED", "not", "a cpu"):
        assert word in text.get()


def test_a_bundle_without_certificate_files(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    (copy / "prompts.jsonl").unlink()
    rewrite(copy)
    checks = found(verify(copy, FEW))
    for name in ("golden", "float32 agreement", "row independence", "losslessness"):
        assert checks[name].passed is None and "not run" in checks[name].detail


def test_a_bundle_that_only_decodes_plainly(folder: Path) -> None:
    rewrite(folder, default_tree="1")
    assert "only decodes plainly" in found(verify(folder, FEW))["losslessness"].detail


def test_a_changed_file_is_no_bundle(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('{"prompt": "other"}')
    with pytest.raises(ForerunError, match="the manifest says"):
        verify(folder, FEW)


def test_golden_logits_that_are_off(folder: Path) -> None:
    engine = load_engine(load_bundle(folder), threads=1)
    logits = engine.score(TOKENS) + np.float32(0.01)
    save_file({"tokens": np.array(TOKENS), "logits": logits}, folder / "golden.safetensors")
    rewrite(folder)
    check = numerics.golden(load_bundle(folder), engine)
    assert check.passed is False and check.facts["max_difference"] == pytest.approx(0.01, rel=0.01)
    # int8 may differ by more, and by any amount where every clear arg-max is the same.
    rewrite(folder, precision="int8")
    assert numerics.golden(load_bundle(folder), engine).passed
    save_file({"tokens": np.array(TOKENS), "logits": logits + 9}, folder / "golden.safetensors")
    rewrite(folder)
    assert numerics.golden(load_bundle(folder), engine).passed
    flipped = np.ascontiguousarray(-logits)
    save_file({"tokens": np.array(TOKENS), "logits": flipped}, folder / "golden.safetensors")
    rewrite(folder)
    assert numerics.golden(load_bundle(folder), engine).passed is False


@pytest.mark.parametrize("kept", ["tokens", "logits"])
def test_a_golden_file_that_lacks_something(folder: Path, kept: str) -> None:
    save_file({kept: np.zeros((3, 260), np.float32)}, folder / "golden.safetensors")
    rewrite(folder)
    with pytest.raises(ForerunError, match=r"golden\.safetensors has no"):
        verify(folder, FEW)


def test_a_golden_file_that_is_none(folder: Path) -> None:
    (folder / "golden.safetensors").write_bytes(b"nothing of the kind")
    rewrite(folder)
    with pytest.raises(ForerunError, match=r"golden\.safetensors: can't be read"):
        verify(folder, FEW)


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine whose speculative steps commit a wrong token at times."""
    original = OrtEngine.step

    def step(self: OrtEngine, nodes: int) -> list[list[int]]:
        rows = original(self, nodes)
        return [[(token + 1) % 256 for token in row] for row in rows] if nodes > 1 else rows

    monkeypatch.setattr(OrtEngine, "step", step)
    yield


def test_a_lossy_engine_fails(folder: Path, lossy: None) -> None:
    certificate = verify(folder, FEW)
    checks = found(certificate)
    assert not certificate.passed
    for name in ("greedy", "sampled"):
        check = checks[f"losslessness, {name}"]
        assert check.passed is False
        assert check.facts["identical"] == 0 and check.facts["different"] == 2
        example = check.facts["examples"][0]
        assert example["prompt"] == 0 and example["position"] == 1 and example["margin"] > 0
        assert "0 of 2 prompts" in check.detail and "2 differ, 0 of them" in check.detail


def test_an_engine_that_forgets_nothing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = OrtEngine.prefill, [0]

    def prefill(self: OrtEngine, request: Request, nodes: int, row: int = 0) -> list[int]:
        calls[0] += 1
        tokens = original(self, request, nodes, row)
        return tokens if calls[0] <= 8 else [1]

    monkeypatch.setattr(OrtEngine, "prefill", prefill)
    check = found(verify(folder, FEW))["repeated runs"]
    assert check.passed is False and check.facts["equal"] == 0


def test_an_engine_that_this_machine_cannot_run(folder: Path) -> None:
    (folder / "engine.plan").write_bytes(b"plan")
    rewrite(folder, engine=EngineFacts("tensorrt", "engine.plan", ("sm_89",), {}))
    certificate = verify(folder, FEW)
    checks = found(certificate)
    assert certificate.passed
    assert checks["engine"].passed is None and checks["engine"].facts["run"] is False
    assert checks["engine"].detail.startswith("engine not run: ")
    assert checks["golden"].passed is True
    assert checks["golden"].detail.endswith("(ONNX graph, by ONNX Runtime)")
    assert checks["float32 agreement"].facts["positions"] == 9
    assert "losslessness, greedy" not in checks


def test_a_graph_of_static_capacity(folder: Path) -> None:
    """TensorRT's graphs have one: ONNX Runtime then takes caches of that size from the start."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for value in model.graph.input:
        axes = value.type.tensor_type.shape.dim
        if value.name.startswith(("keys_", "values_")):
            axes[2].dim_value = 300
        elif value.name == "history":
            axes[1].dim_value = 300
    onnx.save(model, folder / "model.onnx")
    rewrite(folder, engine=EngineFacts("tensorrt", "prompts.jsonl", ("sm_89",), {}))
    check = found(verify(folder, FEW))["golden"]
    assert check.passed and check.facts["top1_agreement"] == 1.0


def test_a_graph_that_onnx_runtime_cannot_run(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"other ops")
    rewrite(folder, engine=EngineFacts("tensorrt", "prompts.jsonl", ("sm_89",), {}))
    check = found(verify(folder, FEW))["golden"]
    assert check.passed is None and "not run" in check.detail
    (folder / "model.onnx").unlink()
    rewrite(folder)
    assert "no graph that runs elsewhere" in found(verify(folder, FEW))["golden"].detail


def test_kl_over_the_best_and_the_rest() -> None:
    generator = np.random.default_rng(0)
    p, q = (log_softmax(generator.normal(size=(5, 100))) for _ in range(2))
    ids = np.argsort(-p, axis=-1)[:, :64]
    rest = np.array([np.setdiff1d(np.arange(100), row) for row in ids])

    def grouped(x: NDArray[Any]) -> NDArray[Any]:
        tail = np.exp(np.take_along_axis(x, rest, 1)).sum(-1, keepdims=True)
        return np.concatenate([np.exp(np.take_along_axis(x, ids, 1)), tail], 1)

    expected = (grouped(p) * np.log(grouped(p) / grouped(q))).sum(-1)
    got = kl(ids, np.take_along_axis(p, ids, 1), (q + 3).astype(np.float32))
    assert np.allclose(got, expected, atol=1e-5) and (got > 0).all()


def test_margin() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.4, 0.3], np.float32))
    assert margin(logits, SamplingParams(), 5) == pytest.approx(np.log(4 / 3), rel=1e-5)
    draw = uniforms(7, 10)[9]
    nearest = min(abs(edge - draw) for edge in (0.1, 0.3, 0.7))
    assert margin(logits, SamplingParams(1.0, seed=7), 9) == pytest.approx(nearest, abs=1e-6)


def test_tolerances_by_precision() -> None:
    assert tolerances("fp32") == tolerances("float32")
    assert tolerances("fp32").logits < tolerances("fp16").logits
    assert tolerances("int8").margin == 0.0
    assert tolerances("int4") == tolerances("fp16")  # the same arithmetic, on other weights
    assert tolerances("fp16").margin < tolerances("fp8").margin
