"""Training of one-layer drafters: what is trained is what drafts, it learns, and it resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.models.drafter import NORMED, Committed  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter  # noqa: E402
from forerun.models.eagle import Eagle  # noqa: E402
from forerun.models.ops import scatter_in_place  # noqa: E402
from forerun.training.eagle import (  # noqa: E402
    EagleTraining,
    feature_layers,
    published,
    start,
    train_eagle,
)
from forerun.training.fit import CHECKPOINT, Settings  # noqa: E402
from forerun.training.lesson import pack  # noqa: E402
from forerun.training.texts import Text  # noqa: E402
from forerun.training.unrolled import Columns, batch_of, losses, trainable, unroll  # noqa: E402

KINDS = ("eagle", "eagle3", "mtp")
SLOTS = 96
SETTINGS = Settings(epochs=4, rate=3e-3, save_every=2, dtype="float32")


@pytest.fixture(scope="module")
def checkpoint(deep_checkpoint: Any) -> Any:
    return deep_checkpoint


def randomised(drafter: Any, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += torch.randn(weight.shape, generator=draw) * 0.2
    return drafter


@pytest.mark.parametrize("kind", KINDS)
def test_an_unrolled_step_says_what_drafting_says(
    checkpoint: Any, kind: str, texts_of: Any
) -> None:
    """Given the drafted tokens as truth, a chain drafted after the context is the unrolled one."""
    vocabulary = checkpoint.config.vocab_size
    ids = torch.arange(vocabulary)
    training = EagleTraining(kind=kind, draft_vocabulary=vocabulary)
    drafter, layer = start(checkpoint, training, ids, SLOTS)
    randomised(drafter)
    drafter.config = replace(drafter.config, depth=4, top_k=1)
    text = texts_of(checkpoint, feature_layers(kind, 6), 1)[0]
    known = text.prompt + 3  # a query in the midst of the answer
    states = [torch.zeros(1, 2, SLOTS, layer.head_dim) for _ in drafter.states()]
    off = torch.zeros(1, dtype=torch.int64)
    committed = Committed(
        tokens=text.tokens[None, : known + 1],
        start=off,
        count=off + known,
        root=text.tokens[None, known],
        features=text.features[None, :known],
        hidden=text.states[None, 3],
        uniforms=torch.zeros(1, 1, SLOTS),
        temperature=torch.zeros(1),
        top_k=off,
        top_p=torch.ones(1),
        branching=False,
    )
    both = Columns.of(checkpoint, ids)
    with torch.no_grad():
        for state, rows in zip(states, drafter.remember(committed, states, both), strict=True):
            scatter_in_place(state, rows, off)
        proposal = drafter.propose(committed, states, both)
    tokens = torch.cat([text.tokens[: known + 1], proposal.tokens[0]])
    features = torch.cat([text.features[:known], torch.zeros(5, text.features.shape[1])])
    answer = torch.zeros(len(tokens) - text.prompt, text.states.shape[1])
    drafted = Text(tokens, text.prompt, features, answer, "loop", False, True)
    trained = trainable(drafter, layer, SLOTS)
    with torch.no_grad():
        steps = list(unroll(trained, batch_of([drafted], 4, torch.arange(vocabulary)), both))
    row = known - text.prompt  # its context row is `known - 1`
    found = [int(step[0, row].argmax()) for step in steps]
    assert found == proposal.tokens[0].tolist()
    scores = [float(step[0, row].log_softmax(-1).max()) for step in steps]
    torch.testing.assert_close(
        torch.tensor(scores).cumsum(0), proposal.scores[0], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_company_and_padding_change_no_loss(checkpoint: Any, kind: str, texts_of: Any) -> None:
    ids = torch.arange(0, checkpoint.config.vocab_size, 2)
    columns = torch.full((checkpoint.config.vocab_size,), -1)
    columns[ids] = torch.arange(len(ids))
    drafter, layer = start(checkpoint, EagleTraining(kind=kind), ids, SLOTS)
    trained = trainable(randomised(drafter), layer, SLOTS)
    texts = [text for text in texts_of(checkpoint, feature_layers(kind, 6), 12) if text.prompt == 4]
    assert len({len(text.tokens) for text in texts}) > 1
    both = Columns.of(checkpoint, ids)
    together = losses(trained, batch_of(texts, 3, columns), both)
    apart = [losses(trained, batch_of([text], 3, columns), both) for text in texts]
    for place in (1, 2):  # counts
        assert together[place].tolist() == sum(part[place] for part in apart).tolist()
    for step in range(3):
        rows = []
        for text in texts:
            truth = text.tokens[text.prompt + 1 + step :]
            rows.append(int((columns[truth] >= 0).sum()))
        mean = sum(part[0][step] * n for part, n in zip(apart, rows, strict=True) if n) / sum(rows)
        torch.testing.assert_close(together[0][step], mean)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_no_row_reaches_spoils_no_weight(
    checkpoint: Any, kind: str, texts_of: Any
) -> None:
    """Answers shorter than the steps unrolled, or of tokens that the drafter does not have."""
    ids = torch.arange(0, checkpoint.config.vocab_size, 2)
    drafter, layer = start(checkpoint, EagleTraining(kind=kind), ids, SLOTS)
    trained = trainable(randomised(drafter), layer, SLOTS)
    texts = texts_of(checkpoint, feature_layers(kind, 6), 2)
    nothing = torch.full((checkpoint.config.vocab_size,), -1)
    found = losses(trained, batch_of(texts, 3, nothing), Columns.of(checkpoint, ids))[0]
    found.sum().backward()
    assert found.tolist() == [0.0] * 3
    gradients = [w.grad for w in trained.parameters() if w.grad is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_the_folder_is_what_was_trained(
    checkpoint: Any, kind: str, texts_of: Any, tmp_path: Path
) -> None:
    texts = texts_of(checkpoint, feature_layers(kind, 6), 12)
    training = EagleTraining(kind=kind, unroll=3, top_k=2, draft_vocabulary=260, batch=120)
    settings, lines = replace(SETTINGS, epochs=60), []
    train_eagle(checkpoint, texts, tmp_path, training, settings, lines.append)
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (lines[1], lines[-1]))
    assert last < first
    assert float(lines[-1].split(": ")[-1].split()[-1]) > 0.8  # three right in a row
    assert not (tmp_path / CHECKPOINT).exists()
    loaded = load_drafter(find_drafter(str(tmp_path)), checkpoint, SLOTS)
    assert loaded.kind == kind
    assert isinstance(loaded, Eagle)
    assert (loaded.config.depth, loaded.config.top_k) == (3, 2)
    assert loaded.feature_layers == feature_layers(kind, 6)
    names = published(loaded)
    assert sum(w.numel() for w in names.values()) == sum(w.numel() for w in loaded.parameters())


def test_a_killed_run_ends_as_an_uninterrupted_one(
    checkpoint: Any, texts_of: Any, assert_kills_change_nothing: Any
) -> None:
    texts = texts_of(checkpoint, (NORMED,), 12)
    training = EagleTraining(kind="mtp", unroll=2, draft_vocabulary=260, batch=60)
    lines: dict[str, list[str]] = {"whole": [], "killed": []}

    def train(folder: Path) -> None:
        train_eagle(checkpoint, texts, folder, training, SETTINGS, lines[folder.name].append)

    steps = assert_kills_change_nothing(train, ("config.json", "model.safetensors"))
    assert steps == len(pack([t for t in texts if not t.held_out], 60)) * SETTINGS.epochs
    assert lines["killed"][-1] == lines["whole"][-1]


def test_the_command_line_offers_every_kind() -> None:
    from forerun.training.cli import KINDS as offered
    from forerun.training.kinds import KINDS

    assert offered == list(KINDS)
