"""`python -m benchmarks.peers`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.bench import bundle_facts, machine, versions
from forerun.runtime.bundle import Bundle, load_bundle
from forerun.runtime.chat import encode_prompt
from forerun.runtime.prompts import read_prompts

from . import __doc__ as description
from .compare import Plan, Processes, compare
from .environment import ROOT, Environment
from .exchange import Job
from .prepare import Preparation
from .registry import OURS, VARIANTS, missing
from .report import headline, summary, table


def main() -> None:
    given = arguments()
    peers = Environment.at(given.folder / "venv")
    if given.install:
        for name, reason in peers.install().items():
            print(f"{name} can't be installed: {reason}", file=sys.stderr)
    if given.bundle is None:
        return
    try:
        report = measure(given, peers)
    except ForerunError as error:
        sys.exit(f"{error}")
    show(report)
    if given.json:
        part = given.json.with_name(f"{given.json.name}.part")
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        part.replace(given.json)


def arguments() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=description, formatter_class=form
    )
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--install", action="store_true", help="install the peers first")
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: the bundle's own")
    parser.add_argument("--target", default="smollm2", help="what the bundle was compiled from")
    parser.add_argument("--limit", type=positive, help="only the first so many prompts")
    parser.add_argument("--max-new-tokens", type=positive, default=80)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--nodes", type=positive, help="size of the draft tree; default: the bundle's"
    )
    everybody = list(VARIANTS)
    parser.add_argument("--only", nargs="+", choices=everybody, default=everybody, metavar="NAME",
                        help=", ".join(everybody))  # fmt: skip
    cores = sorted({1, os.cpu_count() or 1})
    parser.add_argument("--threads", type=positive, nargs="+", default=cores, help="numbers to try")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    return parser.parse_args()


def positive(text: str) -> int:
    """A number of one or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def measure(given: argparse.Namespace, peers: Environment) -> dict[str, Any]:
    """The whole comparison."""
    bundle = load_bundle(given.bundle)
    prompts = encoded(bundle, given.prompts, given.limit, given.max_new_tokens)
    preparation = Preparation(given.bundle, given.target, given.folder, peers)
    installed = peers.installed()
    tokens, stops = given.max_new_tokens, bundle.manifest.target.stop_ids
    jobs: dict[str, Job] = {}
    skipped: dict[str, str] = {}
    for name in given.only:
        reason = missing(VARIANTS[name], installed)
        try:
            path = None if reason else preparation.path(VARIANTS[name].source)
        except ForerunError as error:
            reason = str(error)
        if reason or path is None:
            skipped[name] = reason or ""
            continue
        options = {"nodes": given.nodes} if name == OURS and given.nodes else {}
        jobs[name] = Job(name, str(path.resolve()), prompts, tokens, stops, 1, options)
    plan = Plan(given.rounds, tuple(given.threads))
    measured, failed = compare(jobs, plan, Processes(peers), say)
    return {
        "date": date.today().isoformat(),
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": given.max_new_tokens,
        **summary(measured),
        "skipped": {**skipped, **failed},
        "plan": asdict(plan),
        "bundle": bundle_facts(bundle),
        "machine": machine(),
        "versions": versions(),
    }


def encoded(
    bundle: Bundle, path: Path | None, limit: int | None, tokens: int
) -> tuple[tuple[int, ...], ...]:
    """The prompts' token ids, those left out that don't fit the bundle with their answers."""
    manifest = bundle.manifest
    room = manifest.capacity - manifest.pending - max(map(int, manifest.trees)) - tokens
    read = read_prompts(path or bundle.file("prompts.jsonl"), limit)
    every = [tuple(encode_prompt(bundle, prompt.content)) for prompt in read]
    fitting = tuple(ids for ids in every if len(ids) <= room)
    if not fitting:
        raise ForerunError(f"no prompt is shorter than {room} tokens: compile a larger --capacity")
    return fitting


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160
    console.print(table(report))
    print(headline(report))


if __name__ == "__main__":
    main()
