"""What each kind of drafter costs in a step, and that each changes no token of a real target.

    python benchmarks/drafters.py OUT [--precision int8|fp32] [--only KIND ...]

Every drafter of random weights is written as a folder for SmolLM2-135M, compiled beside it, and
measured with `forerun bench`, greedy and sampled. Random drafts are never accepted: the costs are
real, the speedups are the worst there can be. Needs the extras `cpu` and `compile`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.checkpoint import Checkpoint, load_checkpoint
from forerun.models.dflash import DFlashConfig
from forerun.models.dflash_folder import dflash_shapes, save_dflash
from forerun.models.draft_folder import save_draft_model
from forerun.models.draft_layer import DraftLayerConfig
from forerun.models.weights import tensor_shapes
from forerun.training.dflash import spread_layers
from forerun.training.draft import DraftTraining, small_config
from forerun.training.eagle import EagleTraining, start, write
from forerun.training.fit import Settings

TARGET, NODES = "smollm2", 6
DRAFT_VOCABULARY = 8192
SAMPLED = ("--temperature", "1", "--top-p", "0.9", "--seed", "7")
PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"


def random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Small random matrices; norms of ones."""
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if "norm" in name else torch.randn(*shape, generator=draw) * 0.02
        for name, shape in shapes.items()
    }


def one_layer(kind: str, folder: Path, checkpoint: Checkpoint) -> None:
    """EAGLE-1/2, EAGLE-3 over a reduced vocabulary, or MTP."""
    ids, training = torch.arange(DRAFT_VOCABULARY), EagleTraining(kind=kind)
    drafter, _ = start(checkpoint, training, ids, checkpoint.config.max_positions)
    shapes = {name: tuple(weight.shape) for name, weight in drafter.named_parameters()}
    drafter.load_state_dict(drafter.state_dict() | random(shapes))
    write(folder, checkpoint, drafter, ids, training, Settings())


def dflash(folder: Path, checkpoint: Checkpoint) -> None:
    """DFlash, two layers, five features, blocks of eight, as a tree, over the whole vocabulary."""
    config = DFlashConfig(
        layer=DraftLayerConfig.of(checkpoint.config),
        num_layers=2,
        block_size=8,
        mask_token_id=1,
        feature_layers=spread_layers(checkpoint.config.num_layers),
        tree=True,
    )
    save_dflash(folder, config, random(dict(dflash_shapes(config))), {})


def draft(tokens: int, folder: Path, checkpoint: Checkpoint) -> None:
    """A language model of two layers, 192 wide, that drafts the first so many tokens."""
    config = small_config(checkpoint.config, DraftTraining())
    ids = torch.arange(min(tokens, config.vocab_size))
    save_draft_model(folder, config, random(dict(tensor_shapes(config))), ids, checkpoint, {})


WRITERS: dict[str, Callable[[Path, Checkpoint], None]] = {
    **{kind: partial(one_layer, kind) for kind in ("eagle", "eagle3", "mtp")},
    "dflash": dflash,
    "draft": partial(draft, sys.maxsize),
    "draft-reduced": partial(draft, DRAFT_VOCABULARY),
}
DRAFTERS: dict[str, tuple[str, ...]] = {
    "ngram": ("--drafter", "ngram"),
    "chat": ("--drafter", "chat"),
    "chat+ngram": ("--drafter", "chat+ngram"),
    **{kind: ("--drafter", f"{{}}/{kind}") for kind in WRITERS},
    "eagle3+ngram": ("--drafter", "{}/eagle3+ngram"),
    "draft, rejection": ("--drafter", "{}/draft", "--acceptance", "rejection"),
}


def forerun(*words: str) -> None:
    """The command, in a process of its own."""
    subprocess.run([Path(sys.executable).with_name("forerun"), *words], check=True)


def measure(name: str, out: Path, precision: str, limit: int, tokens: int) -> dict[str, Any]:
    """One drafter: compiled where it is not yet, benched greedy and sampled."""
    bundle = out / f"{name.replace(', ', '-')}-{precision}"
    words = [word.format(out / "drafters") for word in DRAFTERS[name]]
    forerun("compile", TARGET, *words, "--precision", precision, "--tree", str(NODES), "-o",
            str(bundle))  # fmt: skip
    reports = []
    for kind, sampling in (("greedy", ()), ("sampled", SAMPLED)):
        report = out / f"{bundle.name}-{kind}.json"
        forerun("bench", str(bundle), "--prompts", str(PROMPTS), "--limit", str(limit),
                "--max-new-tokens", str(tokens), *sampling, "--json", str(report))  # fmt: skip
        reports.append(json.loads(report.read_text()))
    manifest = json.loads((bundle / "manifest.json").read_text())
    return {"greedy": reports[0], "sampled": reports[1], "manifest": manifest}


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    greedy, sampled = found["greedy"], found["sampled"]
    target = greedy["verify_cost"]["1"]
    # int64: emitted tokens, their count, the new length, the next tree's tokens
    read = 8 * (found["manifest"]["pending"] + 2 + NODES)
    same = [f"{report['identical']}/{report['prompts']}" for report in (greedy, sampled)]
    return (
        f"| {name} | {greedy['draft_cost']:.1f} | {greedy['draft_cost'] / target:.2f} | "
        f"{greedy['verify_cost'][str(NODES)] / target:.2f} | {greedy['host_share']:.1%} | "
        f"{read} | {same[0]} | {same[1]} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--precision", default="int8", choices=["int8", "fp32"])
    parser.add_argument("--only", nargs="*", choices=list(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args()
    checkpoint = load_checkpoint(TARGET)
    for kind, made in WRITERS.items():
        made(given.out / "drafters" / kind, checkpoint)
    lines = []
    for name in given.only:
        found = measure(name, given.out, given.precision, given.limit, given.max_new_tokens)
        lines.append(row(name, found))
        print(lines[-1], flush=True)
    print("\n| drafter | draft, ms | c | verify(6) | host share | bytes read a step | "
          "identical, greedy | identical, sampled |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", *lines, sep="\n")


if __name__ == "__main__":
    main()
