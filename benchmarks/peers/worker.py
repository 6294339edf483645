"""One engine, loaded in a process of its own: `python -m benchmarks.peers.worker JOB OUTCOME`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .exchange import Answer, Generate, Job, Outcome, Recorder, read_job, write_json
from .registry import VARIANTS

WARM_TOKENS = 16


def main() -> None:
    job, variant = read_job(Path(sys.argv[1])), read_job(Path(sys.argv[1])).variant
    adapter = importlib.import_module(f".{VARIANTS[variant].adapter}", __package__)
    outcome = Outcome(tuple(answers(adapter.open_model(job), job)), versions(variant))
    write_json(Path(sys.argv[2]), outcome)


def answers(generate: Generate, job: Job) -> Iterator[Answer]:
    """Every prompt's answer, after one that is thrown away: the first pays for the set-up."""
    generate(job.prompts[0], Recorder(min(WARM_TOKENS, job.max_new_tokens), job.stop_ids))
    for prompt in job.prompts:
        recorder = Recorder(job.max_new_tokens, job.stop_ids)
        generate(prompt, recorder)
        yield recorder.answer()


def versions(variant: str) -> dict[str, str]:
    """Of the packages that the variant needs."""
    names = VARIANTS[variant].packages or ("forerun", "onnxruntime")
    return {name: metadata.version(name) for name in names}


if __name__ == "__main__":
    main()
