"""Draft models from checkpoint folders: read, refused, exported, compiled, certified."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from forerun.compiler.eager import EagerStep  # noqa: E402
from forerun.compiler.export import export_step  # noqa: E402
from forerun.compiler.options import CompileOptions  # noqa: E402
from forerun.compiler.pipeline import compile_bundle  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.models.checkpoint import load_checkpoint  # noqa: E402
from forerun.models.draft_folder import VOCABULARY  # noqa: E402
from forerun.models.draft_model import DraftModel  # noqa: E402
from forerun.models.drafter_folder import vocabulary_tensors  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter  # noqa: E402
from forerun.models.hf_config import config_from_json, read_json  # noqa: E402
from forerun.models.step import Step  # noqa: E402
from forerun.models.target import Target  # noqa: E402
from forerun.models.weights import tensor_shapes  # noqa: E402
from forerun.runtime.bundle import load_bundle  # noqa: E402
from forerun.runtime.engine import Request, load_engine  # noqa: E402
from forerun.runtime.sampling import SamplingParams, uniform_tables  # noqa: E402
from forerun.runtime.verify import VerifyConfig, verify  # noqa: E402

PROMPT = [70, 71, 72, 0, 70, 71]
CAPACITY = 128
IDS = torch.arange(1, 257, 2).flip(0)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory, tiny_checkpoint_folder) -> Path:
    """One random layer that shares the tiny target's tokenizer."""
    folder = tmp_path_factory.mktemp("draft") / "small"
    values = json.loads((tiny_checkpoint_folder / "config.json").read_text())
    write_draft(folder, values, Tokenizer.from_file(str(tiny_checkpoint_folder / "tokenizer.json")))
    return folder


@pytest.fixture(scope="module")
def reduced_folder(tmp_path_factory, draft_folder) -> Path:
    """The same one, of which half of the letters are drafted, out of order."""
    folder = Path(shutil.copytree(draft_folder, tmp_path_factory.mktemp("draft") / "reduced"))
    save_file(vocabulary_tensors(IDS, 260), folder / VOCABULARY)
    return folder


def write_draft(folder: Path, values: dict[str, Any], tokenizer: Tokenizer) -> None:
    """A checkpoint of random weights, like the one of configuration `values` but smaller."""
    folder.mkdir()
    values |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(values))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = config_from_json(read_json(folder / "config.json"), "config.json")
    generator = torch.Generator().manual_seed(8)
    weights = {
        name: torch.randn(*shape, generator=generator) * 0.3 + ("norm" in name)
        for name, shape in tensor_shapes(config)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def changed(folder: Path, tmp_path: Path, **values) -> Path:
    """A copy of the folder with other values in its configuration."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | values))
    return copy


def make_step(target_folder: Path, draft: Path, acceptance: str, gamma: int):
    checkpoint = load_checkpoint(target_folder)
    drafter = load_drafter(find_drafter(str(draft)), checkpoint, CAPACITY, acceptance)
    drafter.trim([1, gamma + 1])
    return Step(Target(checkpoint.config, checkpoint.weights, CAPACITY), drafter).eval()


def test_a_folder_of_a_language_model_is_a_draft_model(draft_folder, tiny_checkpoint_folder):
    source = find_drafter(str(draft_folder))
    assert (source.kind, source.name) == ("draft", "small")
    drafter = load_drafter(source, load_checkpoint(tiny_checkpoint_folder), CAPACITY)
    assert isinstance(drafter, DraftModel)
    assert drafter.options()["layers"] == 1


def test_a_gguf_file_is_a_draft_model(tmp_path):
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    source = find_drafter(str(file))
    assert (source.kind, source.name, source.folder) == ("draft", "some", file)
    with pytest.raises(ForerunError, match=r"neither a folder with a config\.json, a \.gguf file"):
        find_drafter(str(tmp_path / "none.gguf"))


def test_drafts_are_what_transformers_says(draft_folder, tiny_checkpoint_folder):
    transformers = pytest.importorskip("transformers")
    small = transformers.AutoModelForCausalLM.from_pretrained(draft_folder).eval()
    eager = EagerStep(make_step(tiny_checkpoint_folder, draft_folder, "matching", 5), 64)
    inputs, text = eager.prefill_inputs(PROMPT, [len(PROMPT) - 1], 6), list(PROMPT)
    for _ in range(3):
        outputs, _, _ = eager.run(inputs)
        text += outputs.emitted[0, : int(outputs.count[0])].tolist()
        continued = small.generate(
            torch.tensor([text]), max_new_tokens=5, min_new_tokens=5, do_sample=False
        )
        assert outputs.next_tokens[0].tolist() == continued[0, len(text) - 1 :].tolist()
        inputs = eager.step_inputs(inputs, outputs)


def test_another_vocabulary_is_refused(draft_folder, tiny_checkpoint_folder, tmp_path):
    target = load_checkpoint(tiny_checkpoint_folder)
    text = (draft_folder / "tokenizer.json").read_text()
    copy = Path(shutil.copytree(draft_folder, tmp_path / "swapped"))
    tokens = {token: text for text, token in Tokenizer.from_str(text).get_vocab().items()}
    values = json.loads(text)
    values["model"]["vocab"] |= {tokens[65]: 66, tokens[66]: 65}
    (copy / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ForerunError) as caught:
        load_drafter(find_drafter(str(copy)), target, CAPACITY)
    for part in ("not the target's", f"token 65 is {tokens[66]!r}", f"{tokens[65]!r}"):
        assert part in str(caught.value)
    wider = changed(draft_folder, tmp_path, vocab_size=264)
    weights = {
        name: torch.zeros(shape)
        for name, shape in tensor_shapes(config_from_json(read_json(wider / "config.json"), ""))
    }
    save_file(weights, wider / "model.safetensors")
    with pytest.raises(ForerunError, match="logits for 264 tokens, the target for 260, from id 26"):
        load_drafter(find_drafter(str(wider)), target, CAPACITY)


def test_rejection_needs_a_drafter_with_a_distribution(tiny_checkpoint_folder):
    with pytest.raises(ForerunError, match="--acceptance rejection: the ngram drafter"):
        load_drafter(
            find_drafter("ngram"), load_checkpoint(tiny_checkpoint_folder), CAPACITY, "rejection"
        )


def test_drafts_of_a_reduced_vocabulary_are_the_best_of_it(reduced_folder, tiny_checkpoint_folder):
    transformers = pytest.importorskip("transformers")
    small = transformers.AutoModelForCausalLM.from_pretrained(reduced_folder).eval()
    eager = EagerStep(make_step(tiny_checkpoint_folder, reduced_folder, "matching", 5), 64)
    outputs, _, _ = eager.run(eager.prefill_inputs(PROMPT, [len(PROMPT) - 1], 6))
    text = PROMPT + outputs.emitted[0, :1].tolist()
    for token in outputs.next_tokens[0, 1:].tolist():
        logits = small(torch.tensor([text])).logits[0, -1]
        assert token == int(IDS[logits[IDS].argmax()])
        text.append(token)


BROKEN = {
    "out of range": ({"d2t": torch.tensor([0, 259])}, "'d2t' leads to token ids from 0 to 260"),
    "another key": ({"d2t": torch.tensor([1, 1]), "ids": torch.ones(2)}, "and no other"),
    "no d2t": ({"ids": torch.ones(2)}, "expected the keys 'd2t' and 't2d'"),
    "damaged": (None, "damaged"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_draft_vocabulary_is_one_line(
    reduced_folder, tiny_checkpoint_folder, tmp_path, case
):
    tensors, message = BROKEN[case]
    copy = Path(shutil.copytree(reduced_folder, tmp_path / "copy"))
    (copy / VOCABULARY).write_bytes(b"nothing of the kind")
    if tensors is not None:
        save_file(tensors, copy / VOCABULARY)
    with pytest.raises(ForerunError, match=message) as caught:
        load_drafter(find_drafter(str(copy)), load_checkpoint(tiny_checkpoint_folder), CAPACITY)
    assert str(copy / VOCABULARY) in str(caught.value)


KINDS = [(folder, rule) for folder in ("whole", "reduced") for rule in ("matching", "rejection")]


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def exported(request, tmp_path_factory, draft_folder, reduced_folder, tiny_checkpoint_folder):
    """(step, signature, ONNX Runtime session)"""
    folder, rule = request.param
    draft = reduced_folder if folder == "reduced" else draft_folder
    step = make_step(tiny_checkpoint_folder, draft, rule, 3)
    path = tmp_path_factory.mktemp("onnx") / "step.onnx"
    facts = export_step(step, path)
    return step, facts, ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.slow  # exports
@pytest.mark.parametrize("params", [(0.0, 0, 1.0), (0.9, 0, 1.0), (1.2, 30, 0.9)])
def test_the_exported_step_does_what_the_eager_one_does(exported, params):
    step, facts, session = exported
    eager = EagerStep(step, 64)
    tables = torch.from_numpy(uniform_tables(3, 64, step.drafter.tables))[None]
    inputs = replace(
        eager.prefill_inputs(PROMPT, [len(PROMPT) - 1], 4),
        uniforms=tables,
        temperature=torch.tensor(params[:1]),
        top_k=torch.tensor(params[1:2]),
        top_p=torch.tensor(params[2:]),
    )
    counts = []
    for _ in range(6):
        given = [getattr(inputs, field.name) for field in fields(inputs)]
        given += [*eager.caches.keys, *eager.caches.values, *eager.states]
        feed = {
            name: np.array(tensor.numpy()) for name, tensor in zip(facts.inputs, given, strict=True)
        }
        outputs, caches, states = eager.run(inputs)
        made = [*outputs.named().values(), *caches.keys, *caches.values, *states]
        found = dict(zip(facts.outputs, session.run(list(facts.outputs), feed), strict=True))
        count = int(outputs.count[0])
        for name, expected in zip(facts.outputs, made, strict=True):
            if name == "emitted":
                assert found[name][0, :count].tolist() == expected[0, :count].tolist()
            elif expected.is_floating_point():
                torch.testing.assert_close(
                    torch.from_numpy(found[name]), expected, atol=1e-3, rtol=1e-3
                )
            else:
                assert found[name].tolist() == expected.tolist()
        counts.append(count)
        inputs = eager.step_inputs(inputs, outputs)
    if step.drafter.acceptance == "rejection" and params[0] > 0:
        assert states[-1].sum() == pytest.approx(3.0, abs=1e-4)  # q, gamma distributions


def tokens(engine, params: SamplingParams, nodes: int, new: int = 40) -> list[int]:
    found = engine.prefill(Request(PROMPT, len(PROMPT) + new, params), nodes)
    while committed := engine.step(nodes)[0]:
        found += committed
    return found


@pytest.mark.slow  # exports
@pytest.mark.parametrize(("folder", "acceptance"), KINDS)
def test_a_bundle_is_certified(
    tmp_path, draft_folder, reduced_folder, tiny_checkpoint_folder, folder, acceptance
):
    options = CompileOptions(
        target=str(tiny_checkpoint_folder),
        output=tmp_path / acceptance,
        drafter=str(reduced_folder if folder == "reduced" else draft_folder),
        precision="int8" if acceptance == "matching" else "fp32",
        capacity=512,
        trees=(4,),
        acceptance=acceptance,
    )
    bundle = load_bundle(compile_bundle(options).path)
    facts = bundle.manifest.drafter
    assert (facts.kind, facts.options["gamma"], facts.options["acceptance"]) == (
        *("draft", 3),
        acceptance,
    )
    assert facts.tables == (1 if acceptance == "matching" else 4)
    engine = load_engine(bundle, threads=1)
    for params in (SamplingParams(), SamplingParams(0.8, 40, 0.95, seed=3)):
        plain, drafted = (tokens(engine, params, nodes) for nodes in (1, 4))
        assert len(plain) == len(drafted) == 40
        if acceptance == "matching" or params.greedy:
            assert plain == drafted
        assert drafted == tokens(engine, params, 4)
    certificate = verify(bundle.path, VerifyConfig(limit=2, tokens=12, threads=1))
    checks = {check.name: check for check in certificate.checks}
    assert certificate.passed
    assert checks["losslessness, greedy"].passed
    sampled = checks["losslessness, sampled"]
    if acceptance == "matching":
        assert sampled.passed
    else:
        assert sampled.passed is None and "p/q rejection" in sampled.detail
    assert checks["repeated runs"].passed


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["matching", "rejection"])
def test_smollm2_with_a_random_draft_model(tmp_path, acceptance):
    target = load_checkpoint("smollm2")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.config.vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    write_draft(tmp_path / "draft", values, target.tokenizer)
    options = CompileOptions(
        target="smollm2",
        output=tmp_path / "bundle",
        drafter=str(tmp_path / "draft"),
        precision="fp32",
        capacity=512,
        trees=(3,),
        acceptance=acceptance,
    )
    engine = load_engine(load_bundle(compile_bundle(options).path))
    assert tokens(engine, SamplingParams(), 3) == tokens(engine, SamplingParams(), 1)
    sampled = SamplingParams(1.0, top_p=0.9, seed=1)
    drafted = tokens(engine, sampled, 3)
    assert len(drafted) == 40 and drafted == tokens(engine, sampled, 3)
    if acceptance == "matching":
        assert drafted == tokens(engine, sampled, 1)
