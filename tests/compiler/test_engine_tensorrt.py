"""Engines of a tiny step are built here; running one needs a GPU that the engine was made for.

So nothing below deserialises: that the graph computes the right thing is tested on ONNX Runtime,
which runs the same ONNX.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
import torch

from forerun.compiler.builder import BuilderSettings
from forerun.compiler.engine_tensorrt import build_engine, let_refit, refit_engine
from forerun.compiler.export import TRANSLATIONS, export_step
from forerun.errors import ForerunError, MissingDependencyError
from forerun.models.combined import Combined
from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.draft_model import DraftModel
from forerun.models.drafter import Drafter
from forerun.models.growing import as_growing
from forerun.models.linear import Linear, transpose_linears
from forerun.models.medusa import Medusa, MedusaConfig
from forerun.models.ngram import NGram
from forerun.models.signature import Signature
from forerun.models.step import Step
from forerun.models.target import Target
from forerun.models.weights import tensor_shapes

SLOTS, HIDDEN, VOCAB, PENDING = 256, 64, 500, 5
NOTHING = Signature({}, ())
SM_90 = BuilderSettings(("sm_90",))
REFIT = BuilderSettings(refit=True)
STEP = {
    "batch": 1,
    "nodes": 8,
    "verified": 8,
    "next_nodes": 8,
    "pending_in": PENDING,
    "uniform_positions": SLOTS,
}
PREFILL = STEP | {"nodes": 128, "verified": 1, "pending_in": 0}
PLAIN = STEP | {"nodes": 1, "verified": 1, "next_nodes": 1}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.1


def tiny_target() -> Target:
    """Two layers with grouped-query attention."""
    heads, kv_heads, dim, wide = 4, 2, 64, 96
    rope = RopeConfig(10000.0, dim)
    config = TargetConfig("llama", VOCAB, HIDDEN, wide, 2, heads, kv_heads, dim, 1e-5, SLOTS, rope)
    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(2):
        shapes = {
            "self_attn.q_proj": (heads * dim, HIDDEN),
            "self_attn.k_proj": (kv_heads * dim, HIDDEN),
            "self_attn.v_proj": (kv_heads * dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, heads * dim),
            "mlp.gate_proj": (wide, HIDDEN),
            "mlp.up_proj": (wide, HIDDEN),
            "mlp.down_proj": (HIDDEN, wide),
        }
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    return Target(config, weights, SLOTS, attention="fused")


def medusa() -> Medusa:
    accuracy = ((0.5, 0.2, 0.1),) * 4
    blocks = [[Linear(random(HIDDEN, HIDDEN), random(HIDDEN))] for _ in range(4)]
    ids = torch.arange(0, VOCAB, 2)
    head = Linear(random(HIDDEN, len(ids)))
    return Medusa(MedusaConfig(4, 1, HIDDEN, 3, accuracy), blocks, [head], ids)


def draft_model(acceptance: str = "matching", ids: torch.Tensor | None = None) -> DraftModel:
    """The tiny target's sizes, other weights."""
    config = tiny_target().config
    weights = {name: random(*shape) for name, shape in tensor_shapes(config)}
    drafter = DraftModel(config, weights, SLOTS, acceptance=acceptance, ids=ids)
    drafter.trim([PENDING])
    return drafter


DRAFTERS = {
    "plain": Drafter,
    "ngram": lambda: NGram(PENDING - 1),
    "medusa": medusa,
    "draft": draft_model,
    "draft, rejection": lambda: draft_model("rejection"),
    "draft of some tokens, rejection": lambda: draft_model("rejection", torch.arange(0, VOCAB, 2)),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_step_with_each_drafter_builds_in_half_precision(kind: str, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    step = Step(tiny_target(), DRAFTERS[kind](), pending=PENDING).half()
    step.branching = not kind.startswith("draft")
    facts = export_step(step, tmp_path / "step.onnx", {"slots": SLOTS}, loops=step.branching)
    out = tmp_path / "step.engine"
    versions = build_engine(
        tmp_path / "step.onnx", out, facts, [STEP, PREFILL, PLAIN], "tensorrt-rtx"
    )
    assert versions == {"tensorrt-rtx": trt.__version__}
    assert out.stat().st_size > 0
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("kind", ["medusa", pytest.param("draft", marks=pytest.mark.slow)])
def test_the_drafters_weights_alone_are_made_refittable(kind: str, tmp_path: Path) -> None:
    """By the builder's own account of the parsed graph; refitting itself needs a GPU."""
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    step = Step(tiny_target(), DRAFTERS[kind](), pending=PENDING).half()
    step.branching = False
    path = tmp_path / "step.onnx"
    export_step(step, path, {"slots": SLOTS}, loops=False)
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network, config = builder.create_network(0), builder.create_builder_config()
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse_from_file(str(path))
    let_refit(trt, network, config, path)
    assert config.get_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
    for weight in onnx.load(path, load_external_data=False).graph.initializer:
        ours = weight.name.startswith("step.drafter.")
        assert network.are_weights_marked_refittable(weight.name) == ours


def test_what_can_be_refitted_only_with_a_gpu_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a GPU here")
    step = Step(tiny_target(), medusa(), pending=PENDING).half()
    step.branching = False
    path, out = tmp_path / "step.onnx", tmp_path / "engine"
    facts = export_step(step, path, {"slots": SLOTS}, loops=False)
    with pytest.raises(ForerunError, match="leave out --refit") as caught:
        build_engine(path, out, facts, [STEP, PREFILL, PLAIN], "tensorrt-rtx", REFIT)
    assert "\n" not in str(caught.value) and not out.exists()
    build_engine(path, out, facts, [STEP, PREFILL, PLAIN], "tensorrt-rtx")
    with pytest.raises(ForerunError, match="can't load it here to refit it"):
        refit_engine(out, tmp_path / "new", {}, "tensorrt-rtx")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_joined_tree_builds_without_branches(tmp_path: Path) -> None:
    """As the pipeline exports for TensorRT: a drafter that grows its tree from two sources."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    drafter = Combined(as_growing(medusa()), PENDING - 1)
    step = Step(tiny_target(), drafter, pending=PENDING).half()
    step.branching = False
    facts = export_step(step, tmp_path / "step.onnx", {"slots": SLOTS}, loops=False)
    out = tmp_path / "step.engine"
    profiles = [STEP, PREFILL, PLAIN]
    build_engine(tmp_path / "step.onnx", out, facts, profiles, "tensorrt-rtx")
    assert out.stat().st_size > 0


def test_an_absent_flavour_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, flavour, extra in (
        ("tensorrt_rtx", "tensorrt-rtx", "rtx"),
        ("tensorrt", "tensorrt", "trt"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingDependencyError, match=rf"pip install 'forerun\[{extra}\]'"):
            build_engine(tmp_path / "a.onnx", tmp_path / "e", NOTHING, [STEP], flavour)


def test_an_unknown_flavour_lists_those_offered(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"offered: tensorrt-rtx, tensorrt$"):
        build_engine(tmp_path / "a.onnx", tmp_path / "e", NOTHING, [STEP], "tensort")


def test_an_unknown_device_lists_those_offered(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    with pytest.raises(ForerunError, match=r"sm_90: .*offered: sm_75, .*, sm_121$"):
        build_engine(tmp_path / "a", tmp_path / "e", NOTHING, [STEP], "tensorrt-rtx", SM_90)


def test_a_broken_onnx_file_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    path = tmp_path / "broken.onnx"
    with pytest.raises(ForerunError, match="no such ONNX file"):
        build_engine(path, tmp_path / "e", NOTHING, [STEP], "tensorrt-rtx")
    path.write_bytes(b"this is no protobuf")
    with pytest.raises(ForerunError, match=r"broken\.onnx: TensorRT can't") as caught:
        build_engine(path, tmp_path / "e", NOTHING, [STEP], "tensorrt-rtx")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "e").exists()


def test_an_unsupported_operator_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    import onnx.parser

    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 24]> g (float[2] x) => (float[2] y)'
        "{ y = NoSuchOperator(x) }"
    )
    path = tmp_path / "odd.onnx"
    onnx.save(model, path)
    facts = Signature({"x": ((2,), torch.float32)}, ("y",))
    with pytest.raises(ForerunError, match="NoSuchOperator"):
        build_engine(path, tmp_path / "e", facts, [{}], "tensorrt-rtx")


def test_a_profile_must_size_every_symbol(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    import onnx.parser

    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 24]> g (float[N] x) => (float[N] y) { y = Neg(x) }'
    )
    path = tmp_path / "neg.onnx"
    onnx.save(model, path)
    facts = Signature({"x": (("nodes",), torch.float32)}, ("y",))
    with pytest.raises(ForerunError, match="gives no size to 'nodes'"):
        build_engine(path, tmp_path / "e", facts, [{"batch": 1}], "tensorrt-rtx")
    out = tmp_path / "e"
    build_engine(path, out, facts, [{"nodes": 4}], "tensorrt-rtx", BuilderSettings(("sm_120",)))
    assert out.stat().st_size > 0


def test_plain_decoding_adds_no_weights_to_an_engine(tmp_path: Path) -> None:
    """By `transpose_linears`: else TensorRT-RTX 1.7.1's kernels for one row read their own copy."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    layers = torch.nn.Sequential(*(Linear(random(2048, 2048)) for _ in range(3))).half()
    x = random(3, 2048).half()
    expected = layers(x)
    transpose_linears(layers)
    torch.testing.assert_close(layers(x), expected)
    path = tmp_path / "chain.onnx"
    torch.onnx.export(
        layers,
        (x,),
        path,
        dynamo=True,
        opset_version=24,
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("nodes")},),
        custom_translation_table=dict(TRANSLATIONS),
        verbose=False,
    )
    facts = Signature({"x": (("nodes", 2048), torch.float16)}, ("y",))
    sizes = []
    for profiles in ([6], [6, 1]):
        out = tmp_path / f"{len(profiles)}.engine"
        build_engine(path, out, facts, [{"nodes": nodes} for nodes in profiles], "tensorrt-rtx")
        sizes.append(out.stat().st_size)
    assert sizes[1] - sizes[0] < 0.5 * sum(p.nbytes for p in layers.parameters())


def test_one_engine_serves_several_devices_and_its_layers_lie_beside_it(tmp_path: Path) -> None:
    """Its weights are there once: it is little larger than the engine for one device alone."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    step = Step(tiny_target(), medusa(), pending=PENDING).half()
    step.branching = False
    path = tmp_path / "step.onnx"
    facts = export_step(step, path, {"slots": SLOTS}, loops=False)
    sizes = {}
    for devices in (("sm_89",), ("sm_120", "sm_89")):
        out = tmp_path / "-".join(devices)
        settings = BuilderSettings(devices, workspace=256)
        build_engine(path, out, facts, [STEP, PREFILL, PLAIN], "tensorrt-rtx", settings)
        sizes[devices] = out.stat().st_size
    assert sizes["sm_89",] < sizes["sm_120", "sm_89"] < 1.1 * sizes["sm_89",]
    found = json.loads((tmp_path / "engine.layers.json").read_text(encoding="utf-8"))
    if not Path("/proc/driver/nvidia/version").exists():
        assert "before the build" in found["what"]
        updates = [layer for layer in found["layers"] if layer["type"] == "KV_CACHE_UPDATE"]
        assert len(updates) == 2 * 2  # keys and values of two layers
        cache = {"name": "keys_0", "shape": [-1, 2, SLOTS, 64], "dtype": "HALF"}
        assert any(cache in layer["inputs"] for layer in updates)
