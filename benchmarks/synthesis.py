"""Synthesis in batches against one prompt at a time: the same prompts, in one run.

    OMP_NUM_THREADS=2 python benchmarks/synthesis.py [--prompts FILE.jsonl] [--bundle PLAIN]

Groups of prompts take turns, so that a machine whose speed drifts favours neither. One prompt at a
time is the same code with a batch of one (cheaper than the runtime's step, for it has neither tree
nor pending rows), and with --bundle also the compiled plain step. Needs the extra `compile`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from forerun.models.checkpoint import load_checkpoint
from forerun.runtime import load
from forerun.runtime.prompts import Prompt, read_prompts
from forerun.training.chat_prompts import chat_prompts
from forerun.training.filters import Excluded
from forerun.training.plan import SynthesizeConfig, capacity, make_plan
from forerun.training.synthesize import Block

Answered = Callable[[Sequence[Prompt]], int]
"""Answers prompts; how many tokens that gave."""


def by_synthesis(target: str, prompts: Sequence[Prompt], config: SynthesizeConfig) -> Answered:
    """Shards as `forerun synthesize` makes them, all prompts of a call in one."""
    checkpoint = load_checkpoint(target)
    room = config.room(checkpoint)
    slots = capacity(make_plan(checkpoint, prompts, Excluded(), config), room, config)
    folder = Path(TemporaryDirectory().name)
    block = Block.of(checkpoint, slots, folder, config, ())

    def answer(group: Sequence[Prompt]) -> int:
        jobs = [*make_plan(checkpoint, group, Excluded(), config).jobs]
        return sum(len(text.answer.tokens) for text in block.answers(jobs, lambda: None))

    return answer


def by_bundle(bundle: Path, limit: int) -> Answered:
    """The compiled step at one node, prompt by prompt."""
    model = load(bundle)

    def answer(group: Sequence[Prompt]) -> int:
        return sum(
            len(model.generate(prompt.content, max_new_tokens=limit, plain=True).token_ids)
            for prompt in group
        )

    return answer


def asked(file: Path | None, count: int) -> list[Prompt]:
    """The file's prompts, or chat prompts of our own."""
    if file is not None:
        return read_prompts(file, count)
    messages = ({"role": "user", "content": text} for _, text in chat_prompts(count, 11))
    return [Prompt((message,), None, None) for message in messages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--bundle", type=Path, help="a bundle; its plain step is timed")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = parser.parse_args()
    prompts = asked(given.prompts, given.count)
    config = SynthesizeConfig(given.max_new_tokens, batch=given.batch)
    ways = {
        f"batch of {given.batch}": by_synthesis(given.target, prompts, config),
        "one at a time": by_synthesis(given.target, prompts, replace(config, batch=1)),
    }
    if given.bundle:
        ways["one at a time, compiled"] = by_bundle(given.bundle, given.max_new_tokens)
    spent, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for answer in ways.values():
        answer(prompts[:1])  # warm up
    for start in range(0, len(prompts), given.batch):
        group = prompts[start : start + given.batch]
        for name, answer in ways.items():
            begun = time.perf_counter()
            tokens[name] += answer(group)
            spent[name] += time.perf_counter() - begun
    speeds = {name: tokens[name] / spent[name] for name in ways}
    first = next(iter(speeds.values()))
    threads = torch.get_num_threads()
    print(f"{len(prompts)} prompts, {given.max_new_tokens} new tokens, {threads} threads")
    for name, speed in speeds.items():
        print(f"{name:24} {tokens[name]:6} tokens in {spent[name]:6.1f} s: {speed:6.1f}/s; "
              f"the batch is {first / speed:.2f} times as fast")  # fmt: skip


if __name__ == "__main__":
    main()
