"""The kinds of drafters that can be trained: each reads the data, fits, writes and measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forerun.models.checkpoint import Checkpoint
from forerun.models.drafters import find_drafter, load_drafter
from forerun.training.data import read_data
from forerun.training.dflash import DFlashTraining, features_read, train_dflash
from forerun.training.draft import DraftTraining, train_draft
from forerun.training.eagle import EagleTraining, feature_layers, train_eagle
from forerun.training.fit import Settings
from forerun.training.medusa import MedusaTraining, train_medusa
from forerun.training.simulate import Played, play
from forerun.training.texts import Text, read_texts
from forerun.training.unrolled import Columns

Say = Callable[[str], None]
Options = Mapping[str, Any]
Train = Callable[[Checkpoint, Sequence[Path], Path, Options, Say], None]
"""(target, data folders, output folder, options by name, where to report)"""
MEASURED = (4, 6, 8)
"""Sizes of the draft trees that are played on held-out answers."""
T = TypeVar("T")


def _medusa(
    checkpoint: Checkpoint, data: Sequence[Path], output: Path, options: Options, say: Say
) -> None:
    answers = read_data(data, checkpoint.config.vocab_size)
    say(f"{len(answers.train.tokens)} tokens to train on")
    training, settings = _taken(MedusaTraining, options), _taken(Settings, options)
    train_medusa(checkpoint, answers, output, training, settings, say)


def _eagle(
    kind: str,
    checkpoint: Checkpoint,
    data: Sequence[Path],
    output: Path,
    options: Options,
    say: Say,
) -> None:
    layers = feature_layers(kind, checkpoint.config.num_layers)
    texts = read_texts(checkpoint, data, layers)
    training = _taken(EagleTraining, dict(options) | {"kind": kind})
    settings = _taken(Settings, dict(options) | {"betas": (0.9, 0.95)})  # as EAGLE is trained
    train_eagle(checkpoint, texts, output, training, settings, say)
    measure(checkpoint, output, [text for text in texts if text.held_out and text.greedy], say)


def _dflash(
    checkpoint: Checkpoint, data: Sequence[Path], output: Path, options: Options, say: Say
) -> None:
    training = _taken(DFlashTraining, options)
    layers = features_read(training, checkpoint.config.num_layers)
    texts = read_texts(checkpoint, data, layers)
    settings = _taken(Settings, dict(options) | {"betas": (0.9, 0.95)})
    train_dflash(checkpoint, texts, output, training, settings, say)
    measure(checkpoint, output, [text for text in texts if text.held_out and text.greedy], say)


def _draft(
    checkpoint: Checkpoint, data: Sequence[Path], output: Path, options: Options, say: Say
) -> None:
    texts = read_texts(checkpoint, data, ())
    settings = _taken(Settings, dict(options) | {"betas": (0.9, 0.95)})
    train_draft(checkpoint, texts, output, _taken(DraftTraining, options), settings, say)
    measure(checkpoint, output, [text for text in texts if text.held_out and text.greedy], say)


TRAIN: dict[str, Train] = {
    "medusa": _medusa,
    **{kind: partial(_eagle, kind) for kind in ("eagle", "eagle3", "mtp")},
    "dflash": _dflash,
    "draft": _draft,
}


def measure(checkpoint: Checkpoint, folder: Path, texts: Sequence[Text], say: Say) -> None:
    """Reports what the drafter in `folder` is worth on held-out answers, by kind of prompt."""
    if not texts:
        say("no greedy answer is held out: nothing to measure on")
        return
    longest = max(len(text.tokens) for text in texts)
    ends = Columns.of(checkpoint)
    whole = load_drafter(find_drafter(str(folder)), checkpoint, longest + 64)
    for nodes in MEASURED:
        drafter = deepcopy(whole)  # trimming drops for good what larger trees need
        drafter.trim([nodes])
        for kind in sorted({text.kind for text in texts}):
            played = play(drafter, ends, [text for text in texts if text.kind == kind], nodes)
            say(_line(kind, nodes, played))


def _line(kind: str, nodes: int, played: Played) -> str:
    depths = " ".join(f"{share:.2f}" for share in played.acceptance_by_depth)
    return f"held-out {kind}, {nodes} nodes: tau {played.tau:.3f}, accepted to depth {depths}"


def _taken(made: type[T], options: Options) -> T:
    """`made` with those of `options` that it has and that were given."""
    names = {field.name for field in fields(made)}  # type: ignore[arg-type]
    return made(**{k: v for k, v in options.items() if k in names and v is not None})
