"""From prompts to a measured drafter, as the two commands do it, and the texts in between."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from forerun.compiler.eager import EagerStep  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.models.drafter import NORMED, Drafter  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter  # noqa: E402
from forerun.models.step import Step  # noqa: E402
from forerun.models.target import Target  # noqa: E402
from forerun.runtime.prompts import Prompt  # noqa: E402
from forerun.training import texts as module  # noqa: E402
from forerun.training.kinds import KINDS, simulate, spread, train  # noqa: E402
from forerun.training.plan import SynthesizeConfig  # noqa: E402
from forerun.training.synthesize import synthesize  # noqa: E402
from forerun.training.synthesize_cli import _layers  # noqa: E402
from forerun.training.texts import read_texts  # noqa: E402

CONFIG = SynthesizeConfig(12, shard=16, batch=8, dtype="float32")
OPTIONS = {"epochs": 1, "unroll": 2, "draft_vocabulary": 64, "batch": 400, "heads": None}


@pytest.fixture(scope="module")
def checkpoint(deep_checkpoint: Any) -> Any:
    return deep_checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, checkpoint: Any) -> Path:
    """48 answers, some of them to prompts that begin alike."""
    folder = tmp_path_factory.mktemp("data") / "answers"
    asked = [
        Prompt(None, f"{'as before, ' * (i % 2)}{i} IJKLM", f"chat/{i % 3}") for i in range(48)
    ]
    synthesize(checkpoint, asked, folder, CONFIG)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_commands_make_a_drafter(
    checkpoint: Any, data: Path, tmp_path: Path, kind: str
) -> None:
    lines: list[str] = []
    train(kind, checkpoint, [data], tmp_path / kind, OPTIONS, lines.append)
    assert find_drafter(str(tmp_path / kind)).kind == kind
    assert any(line.startswith("held-out chat, 8 nodes: tau ") for line in lines)
    epochs = [line.split(" ")[2] for line in lines if line.startswith("epoch 1: ")]
    assert epochs == ["loss", "held-out"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_drafter(
    checkpoint: Any, data: Path, tmp_path: Path, kind: str
) -> None:
    """At no rate it stays what it was, its vocabulary included, whatever the new data hold."""
    train(kind, checkpoint, [data], tmp_path / "a", OPTIONS, lambda line: None)
    other = tmp_path / "other"
    asked = [Prompt(None, f"{i}: another text, z{i}", "chat") for i in range(20)]
    synthesize(checkpoint, asked, other, CONFIG)
    options = {**OPTIONS, "start": str(tmp_path / "a"), "rate": 1e-12}
    train(kind, checkpoint, [other], tmp_path / "b", options, lambda line: None)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["training"]["start"] == "a"
    before, after = (
        load_drafter(find_drafter(str(tmp_path / name)), checkpoint, 64).state_dict()
        for name in "ab"
    )
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) | {"training": None}
        for name in "ab"
    ]
    measured = ("accuracy", "train_tokens", "held_out")
    first, second = ({k: v for k, v in c.items() if k not in measured} for c in configs)
    assert first == second


def test_a_drafter_to_go_on_from_must_fit(checkpoint: Any, data: Path, tmp_path: Path) -> None:
    train("medusa", checkpoint, [data], tmp_path / "a", OPTIONS, lambda line: None)
    options = {**OPTIONS, "start": str(tmp_path / "a")}
    with pytest.raises(ForerunError, match="a drafter of kind medusa, not mtp"):
        train("mtp", checkpoint, [data], tmp_path / "b", options, lambda line: None)
    with pytest.raises(
        ForerunError, match=r"4\.0\.linear\.weight is to be .*, and there .* nothing"
    ):
        train("medusa", checkpoint, [data], tmp_path / "b", {**options, "heads": 5}, print)
    with pytest.raises(ForerunError, match=r"it has 3\.0\.linear\.bias, for which"):
        train("medusa", checkpoint, [data], tmp_path / "b", {**options, "heads": 3}, print)


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("dflash", {"features": (2, 4)}, "its feature_layers is"),
        ("dflash", {"block": 4}, "its block_size is 8, and 4 is asked for"),
        ("draft", {"heads": 6}, "its num_heads is 3, and 6 is asked for"),
    ],
)
def test_weights_of_the_same_shapes_that_mean_something_else_are_refused(
    checkpoint: Any, data: Path, tmp_path: Path, kind: str, other: dict[str, Any], message: str
) -> None:
    options = {**OPTIONS, "features": (1, 3) if kind == "dflash" else None, "heads": None}
    train(kind, checkpoint, [data], tmp_path / "a", options, lambda line: None)
    options = {**options, "start": str(tmp_path / "a"), **other}
    with pytest.raises(ForerunError, match=message):
        train(kind, checkpoint, [data], tmp_path / "b", options, lambda line: None)


def test_a_drafter_is_played_by_its_name(checkpoint: Any, data: Path, tmp_path: Path) -> None:
    """On what training measured; with prompt lookup beside it on all answers."""
    folder = tmp_path / "eagle3"
    trained = train("eagle3", checkpoint, [data], folder, OPTIONS, lambda line: None)
    lines: list[str] = []
    assert simulate(checkpoint, str(folder), [data], lines.append) == trained
    assert lines[0].startswith("held-out chat, 4 nodes: tau ")
    found = simulate(
        checkpoint, f"{folder}+ngram", [data], lines.append, sizes=[6], everything=True
    )
    assert list(found) == [6]
    texts = [text for text in read_texts(checkpoint, [data], ()) if text.greedy]
    assert len(texts) == 48
    assert found[6].committed == sum(len(text.states) - 1 for text in texts)
    assert lines[-1].startswith("answers chat, 6 nodes: tau ")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "dflash"])
def test_features_asked_for_by_a_kinds_name_are_those_it_trains_on(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`synthesize --features KIND` leaves training nothing to compute."""
    asked = [Prompt(None, f"{i} IJKLM", "chat") for i in range(20)]
    layers = _layers(kind, checkpoint.config.num_layers)
    synthesize(checkpoint, asked, tmp_path / "data", CONFIG, layers=layers)

    def computed(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(module, "_compute", computed)
    train(kind, checkpoint, [tmp_path / "data"], tmp_path / kind, OPTIONS, lambda line: None)


def test_features_are_those_of_a_step_and_kept(
    checkpoint: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where prompts begin alike, so that this part is read once for several."""
    layers = (2, 3, NORMED)
    texts = read_texts(checkpoint, [data], layers, "float32")
    target = Target(checkpoint.config, checkpoint.weights, 128).eval()

    class Reader(Drafter):
        feature_layers = layers

    for text in texts[:20:3]:
        seen: list[Any] = []
        step = Step(target, Reader(), 2).eval()
        committed = step._committed
        monkeypatch.setattr(step, "_committed", lambda *a: seen.append(committed(*a)) or seen[-1])  # noqa: B023
        eager = EagerStep(step, 128)
        eager.run(eager.prefill_inputs(text.tokens.tolist(), [len(text.tokens) - 1]))
        expected = seen[0].features[0, : len(text.tokens)]
        torch.testing.assert_close(text.features.float(), expected, atol=0.05, rtol=0.02)
        states = expected[text.prompt - 1 : -1, -checkpoint.config.hidden_size :]
        torch.testing.assert_close(text.states.float(), states, atol=0.05, rtol=0.02)

    def computed(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(module, "_compute", computed)
    again = read_texts(checkpoint, [data], layers)
    assert all(torch.equal(a.features, b.features) for a, b in zip(texts, again, strict=True))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's counters")
def test_features_stay_in_their_files_until_they_are_used(checkpoint: Any, tmp_path: Path) -> None:
    """200 MB of them cost no memory of the process's own."""
    texts, length, width, hidden = 16, 4096, 800, checkpoint.config.hidden_size
    (tmp_path / "manifest.json").write_text(json.dumps({"target_digest": checkpoint.digest}))
    (tmp_path / "features-2").mkdir()
    columns = {
        "tokens": torch.zeros(texts * length, dtype=torch.int32),
        "lengths": torch.full((texts,), length, dtype=torch.int32),
        "prompt_lengths": torch.full((texts,), length - 2, dtype=torch.int32),
        "states": torch.zeros(2 * texts, hidden, dtype=torch.bfloat16),
        "temperatures": torch.zeros(texts),
        "held_out": torch.zeros(texts, dtype=torch.uint8),
    }
    for shard in ("00000.safetensors", "00001.safetensors"):
        save_file(columns, tmp_path / shard, {"categories": json.dumps(["chat"] * texts)})
        rows = torch.full((texts * length, width), 3, dtype=torch.bfloat16)
        save_file({"features": rows}, tmp_path / "features-2" / shard)
    del rows
    before = own_memory()
    found = read_texts(checkpoint, [tmp_path], (2,))
    assert sum(text.features.nbytes for text in found) > 200e6
    assert own_memory() - before < 20e6
    assert float(found[-1].features[-1, -1]) == 3


def own_memory() -> int:
    """Bytes of the process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kilobytes) * 1024


@pytest.mark.parametrize(("most", "kept"), [(None, 7), (9, 7), (3, 3), (1, 1)])
def test_as_many_answers_as_asked_for_are_measured_on(
    checkpoint: Any, texts_of: Any, tmp_path: Path, most: int | None, kept: int
) -> None:
    """From all over the data, none twice."""
    texts = texts_of(checkpoint, (), 7)
    found = spread(texts, most)
    places = [next(i for i, text in enumerate(texts) if text is one) for one in found]
    assert len(places) == kept
    assert places == sorted(set(places))
    assert places == [*range(7)] or max(b - a for a, b in pairwise([*places, 7])) <= -(-7 // kept)


def test_a_damaged_shard_or_foreign_features_are_one_line(
    checkpoint: Any, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for path in (*data.glob("*.safetensors"), data / "manifest.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    read_texts(checkpoint, [folder], (NORMED,))
    kept = folder / "features-normed"
    first, second = sorted(kept.iterdir())[:2]
    first.write_bytes(second.read_bytes()[:100])
    with pytest.raises(ForerunError, match=r"00000.safetensors: damaged shard") as caught:
        read_texts(checkpoint, [folder], (NORMED,))
    assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForerunError, match="no data in it"):
        read_texts(checkpoint, [tmp_path / "empty"], (NORMED,))


def test_another_targets_data_are_refused(checkpoint: Any, data: Path, tmp_path: Path) -> None:
    """Whatever is trained: its features would be those of a target that never said this."""
    other = replace(checkpoint, digest="e" * 64)
    for kind in KINDS:
        with pytest.raises(ForerunError, match="the data are not tiny's answers"):
            train(kind, other, [data], tmp_path / kind, OPTIONS, lambda line: None)


def test_a_shallow_target_has_no_three_layers_to_read(tiny_checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="the target has 2 in all"):
        train("eagle3", tiny_checkpoint, [tmp_path], tmp_path, OPTIONS, lambda line: None)
