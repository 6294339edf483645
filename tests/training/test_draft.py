"""Training of a draft model: what is trained is what drafts, it learns, resumes, and is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.draft_folder import VOCABULARY  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter, vocabulary_matrix  # noqa: E402
from forerun.training.draft import (  # noqa: E402
    DraftTraining,
    in_fewer_dimensions,
    losses,
    pages_of,
    read,
    start,
    train_draft,
    write,
)
from forerun.training.fit import CHECKPOINT, Settings  # noqa: E402
from forerun.training.lesson import Lesson  # noqa: E402
from forerun.training.simulate import play  # noqa: E402
from forerun.training.unrolled import Columns  # noqa: E402

SLOTS = 96
TRAINING = DraftTraining(width=24, depth=2, heads=2, draft_vocabulary=40, batch=120)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Any) -> Any:
    return tiny_checkpoint


@pytest.fixture(scope="module")
def texts(checkpoint: Any, texts_of: Any) -> list[Any]:
    return texts_of(checkpoint, ())  # type: ignore[no-any-return]


def started(checkpoint: Any, texts: list[Any], training: DraftTraining) -> tuple[Any, Lesson]:
    """A model off its start, and its lesson."""
    lesson = Lesson.of(checkpoint, texts, training.draft_vocabulary, lambda line: None)
    drafter = start(checkpoint, training, lesson.ids, SLOTS, 0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += torch.randn(weight.shape, generator=draw) * 0.2
            weight.copy_(weight.half())  # as it will be written
    return drafter, lesson


@pytest.mark.parametrize("vocabulary", [40, 260])
def test_trained_drafted_and_transformers_say_the_same(
    checkpoint: Any, texts: list[Any], vocabulary: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    training = replace(TRAINING, draft_vocabulary=vocabulary)
    drafter, lesson = started(checkpoint, texts, training)
    write(tmp_path, checkpoint, drafter, training, Settings())
    assert (tmp_path / VOCABULARY).exists() == (vocabulary == 40)
    loaded = load_drafter(find_drafter(str(tmp_path)), checkpoint, SLOTS)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for text in texts[:3]:
        tokens = text.tokens[None]
        with torch.no_grad():
            trained = drafter.head(read(drafter, tokens))
            drafted = loaded.head(read(loaded, tokens))
            expected = model(tokens).logits[..., lesson.ids]
        torch.testing.assert_close(trained, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(drafted, expected, atol=1e-4, rtol=1e-4)


def test_losses_are_the_definitions(checkpoint: Any, texts: list[Any]) -> None:
    drafter, lesson = started(checkpoint, texts, TRAINING)
    group, matrix, ids = texts[1:6], vocabulary_matrix(checkpoint), lesson.ids.tolist()
    assert len({len(text.tokens) for text in group}) > 1
    answers, prompts, hits = [], [], []
    with torch.no_grad():
        found = losses(drafter, pages_of(group, lesson.columns), lesson.ends)
        for text in group:
            said = drafter.head(read(drafter, text.tokens[None]))[0]
            for place in range(1, len(text.tokens)):
                truth, log = int(text.tokens[place]), said[place - 1].log_softmax(0)
                if place >= text.prompt:
                    hits.append(ids[int(log.argmax())] == truth)
                if truth not in ids:
                    continue
                if place < text.prompt:
                    prompts.append(-log[ids.index(truth)])
                    continue
                p = (matrix[lesson.ids] @ text.states[place - text.prompt]).softmax(0)
                answers.append(-(p * log).sum())
    expected = [torch.stack(answers).mean(), torch.stack(prompts).mean(), torch.tensor(hits)]
    expected[2] = expected[2].float().mean()
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_it_learns_and_the_folder_plays_as_what_was_trained(
    checkpoint: Any, texts: list[Any], tmp_path: Path
) -> None:
    settings = Settings(epochs=60, rate=1e-2, dtype="float32")
    lines: list[str] = []
    drafter = train_draft(checkpoint, texts, tmp_path, TRAINING, settings, lines.append)
    first, last = (float(line.split("loss ")[1].split(",")[0]) for line in (lines[1], lines[-1]))
    assert last < first
    assert not (tmp_path / CHECKPOINT).exists()
    loaded = load_drafter(find_drafter(str(tmp_path)), checkpoint, SLOTS)
    assert loaded.options()["vocabulary"] == 40
    ends, held_out = Columns.of(checkpoint), [text for text in texts if text.held_out]
    loaded.trim([5])
    drafter.trim([5])
    trained = play(drafter.eval(), ends, held_out, 5)
    assert trained.tau > 2.5
    assert play(loaded, ends, held_out, 5) == trained


def test_a_killed_run_ends_as_an_uninterrupted_one(
    checkpoint: Any, texts: list[Any], assert_kills_change_nothing: Any
) -> None:
    settings = Settings(epochs=4, rate=3e-3, save_every=2, dtype="float32")
    assert_kills_change_nothing(
        lambda folder: train_draft(checkpoint, texts, folder, TRAINING, settings),
        ("config.json", "model.safetensors", VOCABULARY, "tokenizer.json"),
    )


def test_the_start_keeps_who_is_alike() -> None:
    """Of an embedding that lies in few dimensions, all distances but for one factor."""
    draw = torch.Generator().manual_seed(0)
    embedding = torch.randn(30, 4, generator=draw) @ torch.randn(4, 16, generator=draw)
    rows = in_fewer_dimensions(embedding, 6)
    assert rows.shape == (30, 6)
    factor = torch.cdist(embedding, embedding) / torch.cdist(rows, rows)
    off = ~torch.eye(30, dtype=torch.bool)
    torch.testing.assert_close(factor[off], factor[0, 1].expand(870), atol=1e-3, rtol=1e-3)
    assert in_fewer_dimensions(embedding, 20).shape == (30, 20)


def test_a_width_that_heads_do_not_share_evenly_is_one_line(checkpoint: Any) -> None:
    with pytest.raises(ForerunError, match="--width 24 with 5 heads"):
        start(checkpoint, replace(TRAINING, heads=5), torch.arange(40), SLOTS, 0)


def test_the_folder_is_a_plain_llama(checkpoint: Any, texts: list[Any], tmp_path: Path) -> None:
    drafter, _ = started(checkpoint, texts, TRAINING)
    write(tmp_path, checkpoint, drafter, TRAINING, Settings())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"]) == (24, 2)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (260, True)
    assert config["target"] == "tiny"
