"""The kinds of drafters that can be trained: each reads the data, fits, writes and measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import torch

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.drafter import Drafter
from forerun.models.drafters import find_drafter, load_drafter
from forerun.runtime.costs import Costs
from forerun.runtime.replay import Played
from forerun.training import ranks
from forerun.training.data import data_of
from forerun.training.device import CPU
from forerun.training.dflash import DFlashTraining, features_read, train_dflash
from forerun.training.draft import DraftTraining, train_draft
from forerun.training.eagle import EagleTraining, feature_layers, train_eagle
from forerun.training.fit import Settings, Worth
from forerun.training.medusa import MedusaTraining, train_medusa
from forerun.training.simulate import play
from forerun.training.sweep import Point, axes_of, sweep, table
from forerun.training.texts import Text, read_texts
from forerun.training.unrolled import Columns
from forerun.training.worth import costs_of

Say = Callable[[str], None]
Options = Mapping[str, Any]
MEASURED = (4, 6, 8)
"""Sizes of the draft trees that are played on held-out answers."""
SIZES = ("depth", "draft_vocabulary", "heads", "intermediate", "layers", "top_k", "unroll", "width")
"""Options that a sweep may go through."""
JUDGED, JUDGED_NODES = 64, 6
"""Held-out answers, and the tree's size, by which epochs are compared."""
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """How drafters of one kind are trained."""

    training: type[Any]
    """What it takes of the options by their names, besides `Settings`."""
    layers: Callable[[Any, int], tuple[int, ...]]
    """(training, the target's layers) -> the feature layers that are read."""
    train: Callable[..., object]
    """(target, texts, output folder, training, settings, where to report, worth, device)"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's: EAGLE's own."""


def _medusa(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    folder: Path,
    training: MedusaTraining,
    settings: Settings,
    say: Say,
    worth: Worth | None,
    device: torch.device,
) -> None:
    data = data_of(texts, checkpoint)
    say(f"{len(data.train.tokens)} tokens to train on")
    train_medusa(checkpoint, data, folder, training, settings, say, worth, device)


def _no_features(training: object, layers: int) -> tuple[int, ...]:
    return ()


def _eagle_features(training: EagleTraining, layers: int) -> tuple[int, ...]:
    return feature_layers(training.kind, layers)


_EAGLE = Kind(EagleTraining, _eagle_features, train_eagle)
KINDS: dict[str, Kind] = {
    "medusa": Kind(MedusaTraining, _no_features, _medusa, Settings.betas),
    "eagle": _EAGLE,
    "eagle3": _EAGLE,
    "mtp": _EAGLE,
    "dflash": Kind(DFlashTraining, features_read, train_dflash),
    "draft": Kind(DraftTraining, _no_features, train_draft),
}


READING = tuple(kind for kind, entry in KINDS.items() if entry.layers is not _no_features)
"""The kinds of drafters that read features."""


def features_of_kind(kind: str, layers: int, options: Options | None = None) -> tuple[int, ...]:
    """The feature layers, of a target of so many `layers`, that training `kind` reads."""
    return KINDS[kind].layers(_training(kind, options or {}), layers)


def _training(kind: str, options: Options) -> Any:
    return _taken(KINDS[kind].training, {**options, "kind": kind})


def train(
    kind: str,
    checkpoint: Checkpoint,
    data: Sequence[Path],
    output: Path,
    options: Options,
    say: Say,
    bundle: Path | None = None,
    device: torch.device = CPU,
    most: int | None = None,
) -> dict[int, Played]:
    """Trains a drafter, writes its folder, and reports what it is worth on held-out answers.

    `bundle` holds a drafter of this shape: its measured costs predict the speedup. `most` is the
    number of held-out answers that are played at the end; None: all. Under torchrun all processes
    train, each on its `device`, and the first one does everything else. Returns what was played by
    size of the draft tree.
    """
    layers = features_of_kind(kind, checkpoint.config.num_layers, options)
    settings = _taken(Settings, {**options, "betas": KINDS[kind].betas})
    with ranks.joined(device):
        first = ranks.rank() == 0
        with ranks.first_then_others():
            texts = read_texts(checkpoint, data, layers, device=device)
        held_out = [text for text in texts if text.held_out and text.greedy]
        KINDS[kind].train(
            checkpoint, texts, output, _training(kind, options), settings,
            say if first else lambda line: None, _worth(checkpoint, held_out[:JUDGED], device),
            device,
        )  # fmt: skip
        if not first:
            return {}
    costs = None if bundle is None else costs_of(bundle)
    return measure(checkpoint, str(output), spread(held_out, most), say, costs, device=device)


def sweep_sizes(
    kind: str,
    target: str,
    checkpoint: Checkpoint,
    data: Sequence[Path],
    output: Path,
    options: Options,
    words: Sequence[str],
    say: Say,
    device: torch.device = CPU,
    most: int | None = None,
) -> None:
    """`train` for every combination of sizes in `words` (`name=1,2`); each drafter is compiled as
    `forerun compile` does by default, and its bundle measured here."""
    from forerun.compiler.options import CompileOptions
    from forerun.compiler.pipeline import compile_bundle

    axes = axes_of(words, [name for name in SIZES if name in options])

    def train_point(point: Point, folder: Path) -> dict[int, Played]:
        wanted = {**options, **point}
        return train(kind, checkpoint, data, folder, wanted, say, device=device, most=most)

    def build(folder: Path) -> Costs:
        bundle = folder / "bundle"
        compile_bundle(CompileOptions(target, bundle, str(folder), trees=MEASURED), say)
        return costs_of(bundle)

    facts = {"kind": kind, "target": checkpoint.digest, "options": {**options}}
    for line in table(sweep(axes, output, facts, train_point, build, say), list(axes)):
        say(line)


def measure(
    checkpoint: Checkpoint,
    name: str,
    texts: Sequence[Text],
    say: Say = lambda line: None,
    costs: Costs | None = None,
    sizes: Sequence[int] = MEASURED,
    which: str = "held-out",
    device: torch.device = CPU,
) -> dict[int, Played]:
    """Reports what the drafter `name` (a folder, a shipped one, either with `+ngram`) is worth on
    the greedy answers `texts`, by kind of prompt; with `costs` the sizes are the bundle's."""
    if not texts:
        say("no greedy answer is held out: nothing to measure on")
        return {}
    ends, total = Columns.of(checkpoint).to(device), {}
    for nodes in sizes if costs is None else sorted(costs.step):
        drafter, parts = _sized(checkpoint, name, texts, nodes).to(device), {}
        for kind in sorted({text.kind for text in texts}):
            chosen = [text for text in texts if text.kind == kind]
            parts[kind] = play(drafter, ends, chosen, nodes, device)
            say(_line(f"{which} {kind}".strip(), nodes, parts[kind], costs))
        total[nodes] = reduce(add, parts.values())
        if len(parts) > 1:
            say(_line(f"{which}, all kinds", nodes, total[nodes], costs))
    return total


def simulate(
    checkpoint: Checkpoint,
    name: str,
    data: Sequence[Path],
    say: Say,
    bundle: Path | None = None,
    sizes: Sequence[int] = MEASURED,
    everything: bool = False,
    device: torch.device = CPU,
) -> dict[int, Played]:
    """`measure` on the greedy answers of the `data` folders: the held-out ones, or `everything`.

    Raises ForerunError where there is none.
    """
    # Which features it reads does not depend on the room that its caches get.
    layers = load_drafter(find_drafter(name), checkpoint, 64).feature_layers
    texts = read_texts(checkpoint, data, layers, device=device)
    chosen = [text for text in texts if text.greedy and (everything or text.held_out)]
    if not chosen:
        where = "" if everything else " is held out by hash (--all takes the others as well)"
        raise ForerunError(f"no greedy answer{where} in the data: synthesize some at temperature 0")
    costs = None if bundle is None else costs_of(bundle)
    which = "answers" if everything else "held-out"
    return measure(checkpoint, name, chosen, say, costs, sizes, which, device)


def spread(texts: Sequence[Text], most: int | None) -> list[Text]:
    """So many of `texts`, at even distances, so that all folders and kinds have their share; None,
    or more than there are: all."""
    count = len(texts) if most is None else min(most, len(texts))
    return [texts[place * len(texts) // count] for place in range(count)]


def _sized(checkpoint: Checkpoint, name: str, texts: Sequence[Text], nodes: int) -> Drafter:
    """The drafter `name` for trees of `nodes` nodes on `texts`."""
    longest = max(len(text.tokens) for text in texts)
    drafter = load_drafter(find_drafter(name), checkpoint, longest + 64)
    drafter.trim([nodes])
    return drafter


def _worth(checkpoint: Checkpoint, texts: Sequence[Text], device: torch.device) -> Worth | None:
    """Tokens a step on the answers `texts`; None where there are none."""
    if not texts:
        return None
    ends = Columns.of(checkpoint).to(device)

    def worth(folder: Path) -> float:
        drafter = _sized(checkpoint, str(folder), texts, JUDGED_NODES).to(device)
        return play(drafter, ends, texts, JUDGED_NODES, device).tau

    return worth


def _line(which: str, nodes: int, played: Played, costs: Costs | None) -> str:
    depths = " ".join(f"{share:.2f}" for share in played.acceptance_by_depth)
    line = f"{which}, {nodes} nodes: tau {played.tau:.3f}, accepted to depth {depths}"
    if costs is None:
        return line
    return f"{line}; predicted speedup {costs.speedup(played.tau, nodes):.2f}"


def _taken(made: type[T], options: Options) -> T:
    """`made` with those of `options` that it has and that were given."""
    names = {field.name for field in fields(made)}  # type: ignore[arg-type]
    return made(**{k: v for k, v in options.items() if k in names and v is not None})
