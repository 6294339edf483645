"""The kinds of drafters that can be trained: each reads the data, fits, writes and measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, TypeVar

from forerun.models.checkpoint import Checkpoint
from forerun.models.drafter import Drafter
from forerun.models.drafters import find_drafter, load_drafter
from forerun.training import ranks
from forerun.training.data import read_data
from forerun.training.dflash import DFlashTraining, features_read, train_dflash
from forerun.training.draft import DraftTraining, train_draft
from forerun.training.eagle import EagleTraining, feature_layers, train_eagle
from forerun.training.fit import Settings, Worth
from forerun.training.medusa import MedusaTraining, train_medusa
from forerun.training.simulate import Played, play
from forerun.training.sweep import Point, axes_of, sweep, table
from forerun.training.texts import Text, read_texts
from forerun.training.unrolled import Columns
from forerun.training.worth import Costs

Say = Callable[[str], None]
Options = Mapping[str, Any]
Train = Callable[[Checkpoint, Sequence[Path], Path, Options, Say], Sequence[Text]]
"""(target, data folders, output folder, options by name, where to report) -> the data's texts"""
MEASURED = (4, 6, 8)
"""Sizes of the draft trees that are played on held-out answers."""
SIZES = ("depth", "draft_vocabulary", "heads", "intermediate", "layers", "width")
"""Options that a sweep may go through."""
JUDGED, JUDGED_NODES = 64, 6
"""Held-out answers, and the tree's size, by which epochs are compared."""
T = TypeVar("T")


def _medusa(
    checkpoint: Checkpoint, data: Sequence[Path], output: Path, options: Options, say: Say
) -> Sequence[Text]:
    answers = read_data(data, checkpoint.config.vocab_size)
    say(f"{len(answers.train.tokens)} tokens to train on")
    training, settings = _taken(MedusaTraining, options), _taken(Settings, options)
    texts = _texts(checkpoint, data, ())
    train_medusa(checkpoint, answers, output, training, settings, say, _worth(checkpoint, texts))
    return texts


def _eagle(
    kind: str,
    checkpoint: Checkpoint,
    data: Sequence[Path],
    output: Path,
    options: Options,
    say: Say,
) -> Sequence[Text]:
    layers = feature_layers(kind, checkpoint.config.num_layers)
    texts = _texts(checkpoint, data, layers)
    training = _taken(EagleTraining, dict(options) | {"kind": kind})
    settings = _taken(Settings, dict(options) | {"betas": (0.9, 0.95)})  # as EAGLE is trained
    train_eagle(checkpoint, texts, output, training, settings, say, _worth(checkpoint, texts))
    return texts


def _dflash(
    checkpoint: Checkpoint, data: Sequence[Path], output: Path, options: Options, say: Say
) -> Sequence[Text]:
    training = _taken(DFlashTraining, options)
    layers = features_read(training, checkpoint.config.num_layers)
    texts = _texts(checkpoint, data, layers)
    settings = _taken(Settings, dict(options) | {"betas": (0.9, 0.95)})
    train_dflash(checkpoint, texts, output, training, settings, say, _worth(checkpoint, texts))
    return texts


def _draft(
    checkpoint: Checkpoint, data: Sequence[Path], output: Path, options: Options, say: Say
) -> Sequence[Text]:
    texts = _texts(checkpoint, data, ())
    settings = _taken(Settings, dict(options) | {"betas": (0.9, 0.95)})
    training = _taken(DraftTraining, options)
    train_draft(checkpoint, texts, output, training, settings, say, _worth(checkpoint, texts))
    return texts


def _texts(checkpoint: Checkpoint, data: Sequence[Path], layers: Sequence[int]) -> list[Text]:
    """As `read_texts`; of several processes the first computes what is missing."""
    with ranks.first_then_others():
        return read_texts(checkpoint, data, layers)


KINDS: dict[str, Train] = {
    "medusa": _medusa,
    **{kind: partial(_eagle, kind) for kind in ("eagle", "eagle3", "mtp")},
    "dflash": _dflash,
    "draft": _draft,
}


def train(
    kind: str,
    checkpoint: Checkpoint,
    data: Sequence[Path],
    output: Path,
    options: Options,
    say: Say,
    bundle: Path | None = None,
) -> dict[int, Played]:
    """Trains a drafter, writes its folder, and reports what it is worth on held-out answers.

    `bundle` holds a drafter of this shape: its measured costs predict the speedup. Under torchrun
    all processes train, and the first one does everything else. Returns what was played by size of
    the draft tree.
    """
    with ranks.joined():
        first = ranks.rank() == 0
        texts = KINDS[kind](checkpoint, data, output, options, say if first else lambda line: None)
        if not first:
            return {}
    costs = None if bundle is None else Costs.of(bundle)
    return measure(checkpoint, output, _held_out(texts), say, costs)


def sweep_sizes(
    kind: str,
    target: str,
    checkpoint: Checkpoint,
    data: Sequence[Path],
    output: Path,
    options: Options,
    words: Sequence[str],
    say: Say,
) -> None:
    """`train` for every combination of sizes in `words` (`name=1,2`); each drafter is compiled as
    `forerun compile` does by default, and its bundle measured here."""
    from forerun.compiler.options import CompileOptions
    from forerun.compiler.pipeline import compile_bundle

    axes = axes_of(words, [name for name in SIZES if name in options])

    def train_point(point: Point, folder: Path) -> dict[int, Played]:
        return train(kind, checkpoint, data, folder, {**options, **point}, say)

    def build(folder: Path) -> Costs:
        bundle = folder / "bundle"
        compile_bundle(CompileOptions(target, bundle, str(folder), trees=MEASURED), say)
        return Costs.of(bundle)

    facts = {"kind": kind, "target": checkpoint.digest, "options": {**options}}
    for line in table(sweep(axes, output, facts, train_point, build, say), list(axes)):
        say(line)


def measure(
    checkpoint: Checkpoint,
    folder: Path,
    texts: Sequence[Text],
    say: Say = lambda line: None,
    costs: Costs | None = None,
) -> dict[int, Played]:
    """Reports what the drafter in `folder` is worth on the answers `texts`, by kind of prompt."""
    if not texts:
        say("no greedy answer is held out: nothing to measure on")
        return {}
    ends, total = Columns.of(checkpoint), {}
    for nodes in MEASURED if costs is None else sorted(costs.step):
        parts = {}
        for kind in sorted({text.kind for text in texts}):
            chosen = [text for text in texts if text.kind == kind]
            parts[kind] = play(_sized(checkpoint, folder, texts, nodes), ends, chosen, nodes)
            say(_line(kind, nodes, parts[kind], costs))
        total[nodes] = reduce(add, parts.values())
    return total


def _sized(checkpoint: Checkpoint, folder: Path, texts: Sequence[Text], nodes: int) -> Drafter:
    """The drafter in `folder` for trees of `nodes` nodes on `texts`."""
    longest = max(len(text.tokens) for text in texts)
    drafter = load_drafter(find_drafter(str(folder)), checkpoint, longest + 64)
    drafter.trim([nodes])
    return drafter


def _held_out(texts: Sequence[Text]) -> list[Text]:
    return [text for text in texts if text.held_out and text.greedy]


def _worth(checkpoint: Checkpoint, texts: Sequence[Text]) -> Worth | None:
    """Tokens a step on held-out answers; None where there are none."""
    chosen = _held_out(texts)[:JUDGED]
    if not chosen:
        return None
    ends = Columns.of(checkpoint)
    return lambda folder: (
        play(_sized(checkpoint, folder, chosen, JUDGED_NODES), ends, chosen, JUDGED_NODES).tau
    )


def _line(kind: str, nodes: int, played: Played, costs: Costs | None) -> str:
    depths = " ".join(f"{share:.2f}" for share in played.acceptance_by_depth)
    line = f"held-out {kind}, {nodes} nodes: tau {played.tau:.3f}, accepted to depth {depths}"
    if costs is None:
        return line
    return f"{line}; predicted speedup {costs.speedup(played.tau, nodes):.2f}"


def _taken(made: type[T], options: Options) -> T:
    """`made` with those of `options` that it has and that were given."""
    names = {field.name for field in fields(made)}  # type: ignore[arg-type]
    return made(**{k: v for k, v in options.items() if k in names and v is not None})
