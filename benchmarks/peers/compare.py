"""Probe every variant's settings, then measure all in rounds, one fresh process after another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .environment import ROOT, Environment, last_line, worker_variables
from .exchange import Job, Outcome, read_outcome, write_json
from .registry import VARIANTS

PROBE_PROMPTS, PROBE_TOKENS = 3, 48
PATIENCE = 2 * 60 * 60
"""Seconds after which a worker is given up."""
HOPELESS = 0.25
"""A peer below this share of the best one's speed in the first round is not run again: no drift
seen here makes up for it, and it would take most of the time."""


class WorkerError(Exception):
    """A worker process that failed: what it said last."""


Run = Callable[[Job], Outcome]


@dataclass(frozen=True)
class Processes:
    """Runs a job in a fresh process: this project's in this Python, others in the peers'."""

    peers: Environment

    def __call__(self, job: Job) -> Outcome:
        python = Path(sys.executable) if VARIANTS[job.variant].ours else self.peers.python
        with TemporaryDirectory() as folder:
            paths = Path(folder) / "job.json", Path(folder) / "outcome.json"
            write_json(paths[0], job)
            words = [str(python), "-m", f"{__package__}.worker", *map(str, paths)]
            variables = worker_variables(job.threads)
            try:
                done = subprocess.run(
                    words, cwd=ROOT, env=variables, capture_output=True, timeout=PATIENCE
                )
            except subprocess.TimeoutExpired:
                raise WorkerError(f"it took more than {PATIENCE} seconds") from None
            if done.returncode or not paths[1].exists():
                raise WorkerError(f"status {done.returncode}: {last_line(done.stderr)}")
            return read_outcome(paths[1])


@dataclass
class Measured:
    """One variant: the setting that the probe chose, and an outcome a round."""

    job: Job
    outcomes: list[Outcome] = field(default_factory=list)
    probes: list[tuple[int, dict[str, Any], float]] = field(default_factory=list)
    """(threads, options, tokens a second) of every setting tried."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    threads: tuple[int, ...]
    probe_prompts: int = PROBE_PROMPTS
    probe_tokens: int = PROBE_TOKENS


def compare(
    jobs: Mapping[str, Job], plan: Plan, run: Run, say: Callable[[str], object]
) -> tuple[dict[str, Measured], dict[str, str]]:
    """(what was measured, why some failed); a job's threads and options are the probe's choice.

    One that fails in a later round keeps the rounds that it has.
    """
    measured: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    for name, job in jobs.items():
        try:
            measured[name] = probe(job, plan, run, inherited(name, measured))
        except WorkerError as error:
            failed[name] = str(error)
            say(f"{name}: {error}")
        else:
            chosen = measured[name].job
            say(f"{name}: {settings_text(chosen.threads, chosen.options)}")
    for number in range(plan.rounds):
        # Back and forth, so that a machine that slows down or speeds up favours nobody.
        for name in [*measured][:: -1 if number % 2 else 1]:
            if name in failed or (number and hopeless(name, measured)):
                continue
            try:
                outcome = run(measured[name].job)
            except WorkerError as error:
                failed[name] = str(error)
                say(f"{name}: {error}")
                continue
            measured[name].outcomes.append(outcome)
            say(f"round {number + 1}, {name}: {tokens_per_s(outcome):.1f} tokens/s")
    return {name: found for name, found in measured.items() if found.outcomes}, failed


def inherited(name: str, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """What the probe chose for the plain variant of `name`."""
    plain = VARIANTS[name].plain
    if plain is None or plain not in measured:
        return {}
    chosen = measured[plain].job.options
    return {option: chosen[option] for option in VARIANTS[plain].tried}


def probe(job: Job, plan: Plan, run: Run, given: Mapping[str, Any]) -> Measured:
    """The job with the setting that was fastest on a few prompts; WorkerError: none worked.

    Options that are `given` hold where the variant has none of its own.
    """
    short = replace(
        job,
        prompts=job.prompts[: plan.probe_prompts],
        max_new_tokens=min(plan.probe_tokens, job.max_new_tokens),
    )
    probes, reason = [], "no setting to try"
    for threads, tried in VARIANTS[job.variant].settings(plan.threads):
        options = {**given, **tried, **job.options}
        try:
            outcome = run(replace(short, threads=threads, options=options))
        except WorkerError as error:
            reason = str(error)
            continue
        probes.append((threads, options, tokens_per_s(outcome)))
    if not probes:
        raise WorkerError(reason)
    threads, options, _ = max(probes, key=lambda found: found[2])
    return Measured(replace(job, threads=threads, options=options), probes=probes)


def hopeless(name: str, measured: Mapping[str, Measured]) -> bool:
    """Whether the first round left the peer `name` far behind the best one."""
    if VARIANTS[name].ours:
        return False
    firsts = {
        other: tokens_per_s(found.outcomes[0])
        for other, found in measured.items()
        if not VARIANTS[other].ours and found.outcomes
    }
    return firsts[name] < HOPELESS * max(firsts.values())


def tokens_per_s(outcome: Outcome) -> float:
    """Decoded tokens a second over all prompts, prefill excluded."""
    seconds = sum(answer.seconds for answer in outcome.answers)
    tokens = sum(answer.decoded for answer in outcome.answers)
    return tokens / seconds if seconds else 0.0


def settings_text(threads: int, options: Mapping[str, Any]) -> str:
    """A setting for people."""
    words = [f"{name} {value}" for name, value in options.items()]
    return ", ".join([f"{threads} thread{'s' if threads > 1 else ''}", *words])
