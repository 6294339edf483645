"""The torch engine on a CPU: the tokens of ONNX Runtime's engine, for every kind of drafter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.compiler.options import CompileOptions
from forerun.compiler.pipeline import compile_bundle
from forerun.errors import ForerunError
from forerun.models.checkpoint import load_checkpoint
from forerun.models.draft_folder import save_draft_model
from forerun.models.hf_config import config_from_json, read_json
from forerun.models.medusa import MedusaConfig
from forerun.models.medusa_folder import save_medusa
from forerun.models.torch_bundle import STEP_FILE, WEIGHTS_FILE
from forerun.models.weights import tensor_shapes
from forerun.runtime.batch import Job, decode_batch
from forerun.runtime.bench import BenchConfig, bench
from forerun.runtime.bundle import load_bundle, write_manifest
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import Block, decode
from forerun.runtime.model import load
from forerun.runtime.pace import Fixed
from forerun.runtime.prompts import read_prompts
from forerun.runtime.sampling import SamplingParams
from forerun.runtime.verify import VerifyConfig, verify

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

CHUNK, CAPACITY, NODES = 32, 512, 6
PARAMS = [
    SamplingParams(),
    SamplingParams(0.8, seed=3),
    SamplingParams(1.2, top_k=40, top_p=0.9, seed=4),
]
PROMPTS = [[5, 9, 5, 9, 5], [7], [(3 * i) % 11 + 60 for i in range(75)], list(range(32))]
"""The third one takes three prefill chunks, the last one exactly one."""

Compile = Callable[..., Path]
LEARNED = ("medusa", "medusa+ngram", "draft")


@pytest.fixture(scope="session")
def drafters(once: Callable[..., Path], tiny_checkpoint_folder: Path) -> Path:
    """A folder with random Medusa heads, and one with a draft model of one layer."""

    def make(folder: Path) -> None:
        target = load_checkpoint(tiny_checkpoint_folder)
        hidden, generator = target.config.hidden_size, torch.Generator().manual_seed(0)
        heads = {
            f"{head}.0.linear.{kind}": torch.randn(*shape, generator=generator) * 0.1
            for head in range(3)
            for kind, shape in (("weight", (hidden, hidden)), ("bias", (hidden,)))
        }
        accuracy = tuple((0.4, 0.2, 0.1) for _ in range(3))
        save_medusa(folder / "medusa", MedusaConfig(3, 1, hidden, 3, accuracy), heads, {})
        values = read_json(tiny_checkpoint_folder / "config.json")
        config = config_from_json(values | {"num_hidden_layers": 1}, "config.json")
        tensors = {
            name: torch.randn(*shape, generator=generator) * 0.3 + ("norm" in name)
            for name, shape in tensor_shapes(config)
        }
        save_draft_model(folder / "draft", config, tensors, torch.arange(260), target, {})

    return once("torch-drafters", make)


@pytest.fixture(scope="session")
def compiled(once: Callable[..., Path], tiny_checkpoint_folder: Path, drafters: Path) -> Compile:
    """`compiled(engine, drafter, ...)`: a bundle of the tiny checkpoint."""

    def compiled(
        engine: str, drafter: str, precision: str = "fp32", acceptance: str = "matching"
    ) -> Path:
        named = str(drafters / drafter) if drafter in LEARNED else drafter

        def make(folder: Path) -> None:
            compile_bundle(
                CompileOptions(
                    target=str(tiny_checkpoint_folder),
                    output=folder / "bundle",
                    drafter=named,
                    engine=engine,
                    precision=precision,
                    capacity=CAPACITY,
                    chunk=CHUNK,
                    trees=(NODES,),
                    acceptance=acceptance,
                )
            )

        name = f"torch-tests-{engine}-{drafter}-{precision}-{acceptance}"
        return once(name, make) / "bundle"

    return compiled


def answer(
    engine: Any, prompt: Sequence[int], nodes: int, params: SamplingParams, new: int = 50
) -> tuple[list[int], str | None]:
    blocks = list(decode(engine, Request(prompt, len(prompt) + new, params), nodes))
    return [token for block in blocks for token in block.tokens], blocks[-1].finish


@pytest.fixture(scope="session")
def expected(compiled: Compile) -> list[list[tuple[list[int], str | None]]]:
    """ONNX Runtime's plain answers, by parameters and prompts."""
    engine = load_engine(load_bundle(compiled("ort", "ngram")), threads=1)
    return [[answer(engine, prompt, 1, params) for prompt in PROMPTS] for params in PARAMS]


@pytest.mark.parametrize("drafter", ["plain", "ngram", "medusa", "medusa+ngram", "draft"])
def test_tokens_are_those_of_onnx_runtime(
    compiled: Compile, expected: list[list[Any]], drafter: str
) -> None:
    engine = load_engine(load_bundle(compiled("torch", drafter)), threads=1)
    sizes = [1] if drafter == "plain" else [1, NODES]
    for params, answers in zip(PARAMS, expected, strict=True):
        for prompt, wanted in zip(PROMPTS, answers, strict=True):
            for nodes in sizes:
                assert answer(engine, prompt, nodes, params) == wanted


@pytest.mark.slow  # exports
def test_rejection_draws_the_tokens_that_onnx_runtime_draws(compiled: Compile) -> None:
    bundles = [
        load_bundle(compiled(engine, "draft", acceptance="rejection"))
        for engine in ("ort", "torch")
    ]
    reference, engine = (load_engine(bundle, threads=1) for bundle in bundles)
    for params in PARAMS:
        for prompt in PROMPTS:
            assert answer(engine, prompt, NODES, params) == answer(reference, prompt, NODES, params)


@pytest.mark.parametrize("drafter", ["ngram", "medusa+ngram", "draft"])
def test_rows_side_by_side_answer_as_alone(
    compiled: Compile, expected: list[list[Any]], drafter: str
) -> None:
    engine = load_engine(load_bundle(compiled("torch", drafter)), threads=1, rows=2)
    places = [(i, j) for j in range(len(PROMPTS)) for i in range(len(PARAMS))]
    jobs = [
        Job(Request(PROMPTS[j], len(PROMPTS[j]) + (20 if i == 1 else 50), PARAMS[i]))
        for i, j in places
    ]
    found: dict[int, list[int]] = {number: [] for number in range(len(jobs))}
    for event in decode_batch(engine, jobs, NODES):
        assert isinstance(event.outcome, Block)
        found[event.number] += event.outcome.tokens
    for number, (i, j) in enumerate(places):
        assert found[number] == expected[i][j][0][: 20 if i == 1 else 50]


def test_the_context_ends_an_answer(compiled: Compile) -> None:
    engine = load_engine(load_bundle(compiled("torch", "ngram")), threads=1)
    prompt = [60, 61, 62] * 40
    plain = answer(engine, prompt, 1, PARAMS[0], new=10_000)
    assert len(prompt) + len(plain[0]) == engine.context and plain[1] == "length"
    assert answer(engine, prompt, NODES, PARAMS[0], new=10_000) == plain
    for length in (0, engine.context + 1):
        with pytest.raises(ForerunError, match=f"the prompt has {length} tokens"):
            engine.prefill(Request([5] * length, length + 9), NODES)
    assert answer(engine, [5] * engine.context, NODES, PARAMS[0]) == ([], "length")


def test_scores_are_those_of_transformers(compiled: Compile, tiny_checkpoint_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint_folder).eval()
    engine = load_engine(load_bundle(compiled("torch", "ngram")), threads=1)
    with torch.no_grad():
        wanted = llama(torch.tensor([PROMPTS[2]])).logits[0]
    for chunk in (None, 1, 7, 75):
        found = torch.from_numpy(engine.score(PROMPTS[2], chunk))
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_torch_bundle_is_certified(compiled: Compile, precision: str) -> None:
    certificate = verify(
        compiled("torch", "medusa+ngram", precision), VerifyConfig(limit=3, tokens=24, threads=1)
    )
    assert certificate.passed, certificate.to_dict()
    checks = {check.name: check for check in certificate.checks}
    for name in ("engine", "golden", "losslessness, greedy", "repeated runs"):
        assert checks[name].passed


def test_a_torch_bundle_is_measured(compiled: Compile) -> None:
    model = load(compiled("torch", "ngram"), threads=1)
    prompts = read_prompts(model.bundle.file("prompts.jsonl"), 2)
    report = bench(model, prompts, BenchConfig(Fixed(NODES), 24))
    assert report["identical"] == report["prompts"] == 2
    assert report["tau"] >= 1.0 and 0 < report["host_share"] < 1
    assert all(cost > 0 for cost in report["verify_cost"].values())


def test_the_bundle_needs_none_of_its_sources(
    compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are all listed, none is pickled, and none names a path outside of it."""
    folder = compiled("torch", "draft")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    manifest = load_bundle(folder).manifest
    assert names == {*manifest.files, "manifest.json"}
    assert {STEP_FILE, WEIGHTS_FILE, "drafter/config.json", "drafter/model.safetensors"} <= names
    assert not [name for name in names if name.endswith((".pt", ".bin", ".pkl", ".onnx"))]
    for name in ("manifest.json", STEP_FILE, "drafter/config.json"):
        assert str(folder.parent.parent) not in (folder / name).read_text()


@pytest.mark.parametrize("suffix", ["", "+ngram"])
def test_pickled_heads_are_kept_as_safetensors(
    tmp_path: Path, tiny_checkpoint_folder: Path, drafters: Path, suffix: str
) -> None:
    from safetensors.torch import load_file

    heads = load_file(drafters / "medusa" / "medusa.safetensors")
    published = tmp_path / "published"
    published.mkdir()
    torch.save(heads, published / "medusa_lm_head.pt")
    config = json.loads((drafters / "medusa" / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config))
    options = CompileOptions(
        target=str(tiny_checkpoint_folder),
        output=tmp_path / "bundle",
        drafter=str(published) + suffix,
        engine="torch",
        capacity=CAPACITY,
        chunk=CHUNK,
        trees=(NODES,),
    )
    bundle = load_bundle(compile_bundle(options).path)
    assert "drafter/medusa_lm_head.safetensors" in bundle.manifest.files
    assert not [name for name in bundle.manifest.files if name.endswith(".pt")]
    engine = load_engine(bundle, threads=1)
    assert answer(engine, PROMPTS[0], NODES, PARAMS[0]) == answer(engine, PROMPTS[0], 1, PARAMS[0])


def test_a_file_that_nobody_listed_is_not_read(compiled: Compile, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(compiled("torch", "medusa"), tmp_path / "copy"))
    (copy / "drafter" / "draft_vocabulary.safetensors").write_bytes(b"x")
    with pytest.raises(ForerunError, match="lists no file 'drafter/draft_vocabulary"):
        load_engine(load_bundle(copy))


@pytest.mark.parametrize(
    "change", [lambda facts: facts.pop("target"), lambda facts: facts["target"].pop("rope")]
)
def test_damaged_facts_are_one_line(
    compiled: Compile, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    import shutil

    copy = Path(shutil.copytree(compiled("torch", "ngram"), tmp_path / "copy"))
    facts = json.loads((copy / STEP_FILE).read_text())
    change(facts)
    (copy / STEP_FILE).write_text(json.dumps(facts))
    write_manifest(copy, load_bundle(compiled("torch", "ngram")).manifest)
    with pytest.raises(ForerunError, match=r"step\.json: not a step's facts.*compile it again"):
        load_engine(load_bundle(copy))


def test_what_cuda_says_of_a_step_is_one_line(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(load_bundle(compiled("torch", "ngram")))
    request = Request(PROMPTS[0], 40)
    engine.prefill(request, NODES)
    for error, line in (
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to"), "memory does not hold it"),
        (torch.AcceleratorError("CUDA error:\nunspecified"), "CUDA failed"),
    ):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(engine, "_run", fail)
        for call in (lambda: engine.step(NODES), lambda: engine.prefill(request, NODES)):
            with pytest.raises(ForerunError, match=line) as caught:
                call()
            assert "\n" not in str(caught.value)


def test_without_a_graph_steps_are_launched_plainly(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here no graph can be captured, for want of CUDA: it is said once."""
    bundle = load_bundle(compiled("torch", "ngram"))
    expected, engine = load_engine(bundle), load_engine(bundle)
    monkeypatch.setattr(engine, "captures", True)
    request = Request(PROMPTS[0], 60)
    assert engine.prefill(request, NODES) == expected.prefill(request, NODES)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs, so slower: ") as warned:
        found = [engine.step(NODES) for _ in range(6)]
    assert len(warned) == 1
    assert found == [expected.step(NODES) for _ in range(6)]
