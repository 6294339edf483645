"""Training of DFlash: what is trained is what drafts, it learns, it resumes, and it is written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.drafter import Committed  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter, vocabulary_matrix  # noqa: E402
from forerun.training.dflash import (  # noqa: E402
    DFlashTraining,
    default_reach,
    spread_layers,
    start,
    train_dflash,
)
from forerun.training.dflash_blocks import (  # noqa: E402
    blocks_of,
    draw_anchors,
    losses,
    read_blocks,
)
from forerun.training.fit import CHECKPOINT, Settings  # noqa: E402
from forerun.training.kinds import train  # noqa: E402
from forerun.training.lesson import Lesson  # noqa: E402
from forerun.training.simulate import play  # noqa: E402
from forerun.training.unrolled import Columns  # noqa: E402

SLOTS = 96
TRAINING = DFlashTraining(depth=2, block=5, anchors=3, draft_vocabulary=40, batch=60)
LAYERS = spread_layers(6)


@pytest.fixture(scope="module")
def checkpoint(deep_checkpoint: Any) -> Any:
    return deep_checkpoint


@pytest.fixture(scope="module")
def texts(checkpoint: Any, texts_of: Any) -> list[Any]:
    return texts_of(checkpoint, LAYERS)  # type: ignore[no-any-return]


def started(checkpoint: Any, texts: list[Any], training: DFlashTraining) -> tuple[Any, Lesson]:
    """A drafter off its start, so that no part of it is as good as absent, and its lesson."""
    lesson = Lesson.of(checkpoint, texts, training.draft_vocabulary, lambda line: None)
    drafter = start(checkpoint, training, lesson, SLOTS)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape, generator=draw) * 0.2
    return drafter, lesson


def committed_until(text: Any, anchor: int) -> Committed:
    """What drafting reads where `anchor` is the root's position."""
    off = torch.zeros(1, dtype=torch.int64)
    return Committed(
        tokens=text.tokens[None, : anchor + 1],
        start=off,
        count=off + anchor,
        root=text.tokens[None, anchor],
        features=text.features[None, :anchor],
        hidden=text.states[None, 0],
        uniforms=torch.zeros(1, 1, SLOTS),
        temperature=torch.zeros(1),
        top_k=off,
        top_p=torch.ones(1),
        branching=False,
    )


@pytest.mark.parametrize("vocabulary", [40, 260])
def test_a_training_row_says_what_drafting_says(
    checkpoint: Any, texts: list[Any], vocabulary: int
) -> None:
    """Also with other blocks beside it, and a longer text below it."""
    training = replace(TRAINING, draft_vocabulary=vocabulary)
    drafter, lesson = started(checkpoint, texts, training)
    assert (drafter.head is None) == (vocabulary == 260)
    group = [(texts[place], texts[place].prompt + torch.tensor(at)) for place, at in
             ((1, [0, 3, 6]), (5, [2, 4]))]  # fmt: skip
    with torch.no_grad():
        rows = read_blocks(drafter, blocks_of(group, drafter.config, lesson.columns), lesson.ends)
        said = drafter.predict(rows, lesson.ends).unflatten(1, (-1, training.block))[:, :, 1:]
        for row, (text, anchors) in enumerate(group):
            for number, anchor in enumerate(anchors.tolist()):
                committed = committed_until(text, anchor)
                states = drafter.remember(committed, [], lesson.ends)
                drafted = drafter.logits(committed, states, lesson.ends)
                torch.testing.assert_close(said[row, number], drafted[0], atol=1e-5, rtol=1e-5)


def test_losses_are_the_definitions(checkpoint: Any, texts: list[Any]) -> None:
    """Cross-entropy against the target's distribution, slot by slot, in a plain loop."""
    drafter, lesson = started(checkpoint, texts, TRAINING)
    group = [(text, draw_anchors(text, 3, torch.Generator().manual_seed(1))) for text in texts[1:6]]
    with torch.no_grad():
        sums, counts, right, known = losses(
            drafter, blocks_of(group, drafter.config, lesson.columns), lesson.ends
        )
    expected = [[0.0, 0, 0, 0] for _ in range(4)]
    matrix, ids = vocabulary_matrix(checkpoint), lesson.ids.tolist()
    for text, anchors in group:
        for anchor in anchors.tolist():
            committed = committed_until(text, anchor)
            with torch.no_grad():
                states = drafter.remember(committed, [], lesson.ends)
                logits = drafter.logits(committed, states, lesson.ends)[0]
            so_far = True
            for slot in range(1, 5):
                if anchor + slot >= len(text.tokens):
                    break
                truth, row = int(text.tokens[anchor + slot]), expected[slot - 1]
                said = logits[slot - 1]
                so_far = so_far and ids[int(said.argmax())] == truth
                row[2] += so_far
                row[3] += 1
                if truth in ids:
                    p = (matrix[lesson.ids] @ text.states[anchor + slot - text.prompt]).softmax(0)
                    row[0] += float(-(p * said.log_softmax(0)).sum())
                    row[1] += 1
    for place, found in enumerate((sums, counts, right, known)):
        wanted = torch.tensor([row[place] for row in expected], dtype=torch.float32)
        torch.testing.assert_close(found.float(), wanted, atol=1e-3, rtol=1e-4)


def test_anchors_are_answer_tokens_with_one_behind_them(texts: list[Any]) -> None:
    text = texts[2]
    drawn = torch.cat(
        [draw_anchors(text, 4, torch.Generator().manual_seed(seed)) for seed in range(60)]
    )
    assert set(drawn.tolist()) == set(range(text.prompt, len(text.tokens) - 1))
    once = draw_anchors(text, 99, torch.Generator())
    assert once.tolist() == list(range(text.prompt, len(text.tokens) - 1))


def test_the_start_reads_as_the_targets_layer_does(checkpoint: Any, texts: list[Any]) -> None:
    """Keys before their norm and values of the context are those of the target's own layer."""
    lesson = Lesson.of(checkpoint, texts, 40, lambda line: None)
    drafter = start(checkpoint, replace(TRAINING, features=(3,), depth=1), lesson, SLOTS)
    feature = torch.randn(7, 32, generator=torch.Generator().manual_seed(3))
    own = {k.removeprefix("model.layers.3."): w for k, w in checkpoint.weights.items()}
    normed = torch.nn.functional.rms_norm(feature, (32,), own["input_layernorm.weight"], 1e-5)
    context = drafter.context_norm(drafter.fuse(feature))
    attention = drafter.layers[0].attention
    for name, module in (("k", attention.key), ("v", attention.value)):
        expected = normed @ own[f"self_attn.{name}_proj.weight"].T
        torch.testing.assert_close(module(context), expected, atol=1e-4, rtol=1e-4)


def test_defaults_are_the_papers() -> None:
    assert [default_reach(block) for block in (8, 10, 16)] == [4, 5, 7]
    assert spread_layers(30) == (1, 8, 15, 22, 29)
    assert math.isclose(default_reach(4), 2)


def test_it_learns_and_the_folder_plays_as_what_was_trained(
    checkpoint: Any, texts: list[Any], tmp_path: Path
) -> None:
    settings = Settings(epochs=60, rate=3e-3, dtype="float32")
    lines: list[str] = []
    drafter = train_dflash(checkpoint, texts, tmp_path, TRAINING, settings, lines.append)
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (lines[1], lines[-1]))
    assert last < first
    assert not (tmp_path / CHECKPOINT).exists()
    loaded = load_drafter(find_drafter(str(tmp_path)), checkpoint, SLOTS)
    assert (loaded.kind, loaded.feature_layers) == ("dflash", LAYERS)
    ends, held_out = Columns.of(checkpoint), [text for text in texts if text.held_out]
    trained = play(drafter.eval(), ends, held_out, 5)
    assert trained.tau > 2.5
    assert play(loaded, ends, held_out, 5) == trained


def test_a_killed_run_ends_as_an_uninterrupted_one(
    checkpoint: Any, texts: list[Any], assert_kills_change_nothing: Any
) -> None:
    settings = Settings(epochs=3, rate=3e-3, save_every=2, dtype="float32")
    assert_kills_change_nothing(
        lambda folder: train_dflash(checkpoint, texts, folder, TRAINING, settings),
        ("config.json", "model.safetensors"),
    )


def test_a_feature_layer_that_is_not_there_is_one_line(checkpoint: Any, tmp_path: Path) -> None:
    """Before anything is read."""
    with pytest.raises(ForerunError, match="--feature-layer 7: the target's hidden states"):
        train("dflash", checkpoint, [tmp_path], tmp_path, {"features": (2, 7)}, print)
