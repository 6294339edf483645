"""What is to be answered: prompts, less those that are dropped, times temperatures and samples."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.runtime.chat import render_chat
from forerun.runtime.prompts import Prompt
from forerun.training.filters import Excluded, allowed, distinct, is_held_out
from forerun.training.generate import SLOT_STEP
from forerun.training.shards import STATE_BYTES, TOKEN_BYTES, TOP_BYTES

TEXT_BYTES = 128
"""More than a text's own row of lengths, places and category takes."""


@dataclass(frozen=True)
class SynthesizeConfig:
    """What shapes the answers; all of it is in the manifest, and a resumed run must agree."""

    max_new_tokens: int = 160
    max_prompt_tokens: int = 640
    """Longer prompts are dropped, and counted; a conversation that grows longer ends."""
    temperatures: tuple[float, ...] = (0.0,)
    samples: int = 1
    """Answers to a prompt at each temperature; at temperature 0 they are all the same: one."""
    greedy_share: float = 0.0
    """The share of prompts that are answered at temperature 0 alone, whatever the temperatures."""
    seed: int = 0
    shard: int = 256
    """Answers, or whole conversations, in a shard. A shard is decoded by itself, so that nothing
    outside it changes a bit of it."""
    batch: int = 192
    """Rows decoded side by side."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are kept at every place of an answer."""
    dtype: str = "bfloat16"
    threads: int = field(default_factory=torch.get_num_threads)
    """What a shard is decoded with: low precision rounds otherwise with another number."""
    device: str = "cpu"
    """The kind of device, `cpu` or `cuda`: it rounds otherwise as well."""

    def room(self, checkpoint: Checkpoint) -> int:
        """The longest prompt that may be answered. Raises ForerunError where there is none."""
        context = checkpoint.config.max_positions
        if self.max_new_tokens >= context:
            raise ForerunError(
                f"max_new_tokens is {self.max_new_tokens}, which leaves no room for a prompt in "
                f"{checkpoint.name}'s context of {context} tokens: lower it"
            )
        return min(self.max_prompt_tokens, context - self.max_new_tokens)


@dataclass(frozen=True)
class Job:
    """One answer to a prompt, or one whole conversation."""

    index: int
    """The prompt's place in its file, from 0."""
    prompt: Prompt
    tokens: tuple[int, ...]
    """The prompt, up to where the first answer begins."""
    temperature: float
    sample: int

    @property
    def turns(self) -> int:
        """How many answers there are, at most."""
        return 1 + len(self.prompt.later)


@dataclass(frozen=True)
class Plan:
    """All shards' jobs, and what was dropped by reason."""

    shards: tuple[tuple[Job, ...], ...]
    dropped: dict[str, int]
    prompts: int
    held_out: int
    digest: str
    """Of everything that is asked, in order."""

    @property
    def jobs(self) -> Iterator[Job]:
        """All of them, in order."""
        return (job for shard in self.shards for job in shard)


def make_plan(
    checkpoint: Checkpoint, prompts: Sequence[Prompt], excluded: Excluded, config: SynthesizeConfig
) -> Plan:
    """Drops duplicates, what `excluded` forbids and what is too long; cuts the rest into shards.

    Raises ForerunError where nothing is left, or a prompt can't be written as tokens.
    """
    room, dropped = config.room(checkpoint), Counter[str]()
    different = [*distinct(enumerate(prompts))]
    dropped["duplicate"] = len(prompts) - len(different)
    kept: list[tuple[int, Prompt, tuple[int, ...]]] = []
    for index, prompt in allowed(different, excluded, dropped):
        tokens = _encoded(checkpoint, prompt, index)
        if len(tokens) > room:
            dropped["too_long"] += 1
        else:
            kept.append((index, prompt, tokens))
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
        raise ForerunError(
            f"no prompt is left to answer ({reasons}): too_long means more than {room} tokens, "
            "which max_prompt_tokens and the target's context limit"
        )
    jobs = [
        Job(index, prompt, tokens, temperature, sample)
        for index, prompt, tokens in kept
        for temperature, sample in _answers(tokens, config)
    ]
    digest = hashlib.sha256()
    for job in jobs:
        asked = (job.index, job.tokens, job.temperature, job.sample, job.prompt.later)
        digest.update(json.dumps(asked).encode())
    starts = range(0, len(jobs), config.shard)
    return Plan(
        tuple(tuple(jobs[start : start + config.shard]) for start in starts),
        dict(dropped),
        len(kept),
        sum(is_held_out(prompt) for _, prompt, _ in kept),
        digest.hexdigest(),
    )


def capacity(plan: Plan, room: int, config: SynthesizeConfig) -> int:
    """Cache slots that the longest text needs; `room` is the longest prompt's."""
    prompts = (room if job.prompt.later else len(job.tokens) for job in plan.jobs)
    return -(-(max(prompts) + config.max_new_tokens) // SLOT_STEP) * SLOT_STEP


def following_prompt(
    checkpoint: Checkpoint, job: Job, answers: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The conversation after so many `answers`, up to where the next one begins."""
    messages = [*(job.prompt.messages or ({"role": "user", "content": job.prompt.text},))]
    for answer, question in zip(answers, job.prompt.later, strict=False):
        said = [token for token in answer if token not in checkpoint.stop_ids]
        messages.append({"role": "assistant", "content": checkpoint.tokenizer.decode(said)})
        messages.append({"role": "user", "content": question})
    prompt = replace(job.prompt, messages=tuple(messages), text=None)
    return _encoded(checkpoint, prompt, job.index)


def answer_seed(config: SynthesizeConfig, prompt: Sequence[int], job: Job) -> int:
    """The seed of one answer: by what is asked and which sample it is, whatever else is asked."""
    return _hash(config.seed, job.temperature, job.sample, *prompt)


def sizes(
    jobs: Sequence[Job], room: int, config: SynthesizeConfig, hidden: int, layers: int
) -> dict[str, int]:
    """Bytes that the answers of `jobs` take at most, by part; `hidden` is the width of one of the
    `layers` whose features are kept."""
    answers = sum(job.turns for job in jobs)
    prompts = sum(len(job.tokens) + room * len(job.prompt.later) for job in jobs)
    new = answers * config.max_new_tokens
    return {
        "tokens": (prompts + new) * TOKEN_BYTES + answers * TEXT_BYTES,
        "states": new * hidden * STATE_BYTES,
        "features": (prompts + new) * layers * hidden * STATE_BYTES,
        "top log-probabilities": new * config.top_logprobs * TOP_BYTES,
    }


def _answers(tokens: Sequence[int], config: SynthesizeConfig) -> Iterator[tuple[float, int]]:
    """Temperature and number of each answer to a prompt."""
    greedy = _hash(config.seed, *tokens) % 1000 < 1000 * config.greedy_share
    for temperature in (0.0,) if greedy else config.temperatures:
        for sample in range(config.samples if temperature else 1):
            yield temperature, sample


def _encoded(checkpoint: Checkpoint, prompt: Prompt, index: int) -> tuple[int, ...]:
    if checkpoint.chat_template is not None:
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        text = render_chat(
            checkpoint.chat_template,
            messages,
            checkpoint.bos_token,
            checkpoint.eos_token,
            tools=list(prompt.tools) or None,
        )
    elif prompt.text is None:
        raise ForerunError(f"{checkpoint.name}: no chat template: give plain prompts")
    else:
        text = (checkpoint.bos_token or "") * checkpoint.add_bos + prompt.text
    try:
        tokens = tuple(checkpoint.tokenizer.encode(text, add_special_tokens=False).ids)
    except (UnicodeError, TypeError):
        raise ForerunError(
            f"prompt {index + 1}: half a surrogate pair: give valid Unicode"
        ) from None
    if not tokens:
        raise ForerunError(f"prompt {index + 1} is empty: say something")
    return tokens


def _hash(*values: float) -> int:
    digest = hashlib.sha256(json.dumps(values).encode()).digest()
    return int.from_bytes(digest[:8], "big")
