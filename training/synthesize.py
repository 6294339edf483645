"""Prompts -> the target's own answers, in shards that survive a kill.

A shard is decoded by itself, by the same code in this process and in Ray's, so its bytes depend on
its own prompts and the configuration alone. A killed run loses the shards it was working on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.target import Target
from forerun.progress import progress
from forerun.runtime.prompts import Prompt
from forerun.training.filters import Excluded, is_held_out
from forerun.training.generate import Answer, GenerateConfig, Request, generate
from forerun.training.plan import (
    Job,
    Plan,
    SynthesizeConfig,
    answer_seed,
    capacity,
    following_prompt,
    make_plan,
    sizes,
)
from forerun.training.shards import (
    DTYPES,
    MANIFEST,
    Said,
    remove_parts,
    shard_path,
    write_shard,
    write_whole,
)
from forerun.training.texts import has_features, write_features

Say = Callable[[str], None]


@dataclass(frozen=True)
class Open:
    """A shard that lacks its texts (then `jobs` are all of them) or only their features."""

    number: int
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Block:
    """What makes a shard, wherever it runs."""

    checkpoint: Checkpoint
    target: Target
    folder: Path
    config: SynthesizeConfig
    layers: tuple[int, ...]
    """Feature layers that are kept beside the shard; none: nothing is."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        slots: int,
        folder: Path,
        config: SynthesizeConfig,
        layers: tuple[int, ...],
    ) -> Block:
        """With a target of so many cache slots on the device that `config` names; sets the
        process's number of threads."""
        torch.set_num_threads(config.threads)
        target = Target(checkpoint.config, checkpoint.weights, slots, "torch").eval()
        target = target.to(config.device, DTYPES[config.dtype])
        return cls(checkpoint, target, folder, config, layers)

    def make(self, shard: Open, advance: Callable[[], None] = lambda: None) -> int:
        """Writes what the shard lacks; how many answer tokens that added."""
        path, added = shard_path(self.folder, shard.number), 0
        if not path.exists():
            texts = self.answers(shard.jobs, advance)
            write_shard(path, texts)
            added = sum(len(text.answer.tokens) for text in texts)
        if self.layers and not has_features(path, self.layers):
            write_features(self.target, path, self.layers)
        return added

    def answers(self, jobs: Sequence[Job], advance: Callable[[], None]) -> list[Said]:
        """Every job's answers, in order; each but a conversation's last becomes part of what the
        next one answers."""
        room = self.config.room(self.checkpoint)
        settings = GenerateConfig(
            self.checkpoint.stop_ids,
            self.config.max_new_tokens,
            self.config.batch,
            top=self.config.top_logprobs,
        )
        said: list[list[Answer]] = [[] for _ in jobs]

        def request(place: int, tokens: tuple[int, ...]) -> Request:
            job = jobs[place]
            return Request(place, tokens, job.temperature, answer_seed(self.config, tokens, job))

        def follow(answer: Answer) -> Request | None:
            place = answer.request.index
            said[place].append(answer)
            job = jobs[place]
            if len(said[place]) < job.turns:
                before = [answer.tokens for answer in said[place]]
                tokens = following_prompt(self.checkpoint, job, before)
                if len(tokens) <= room:
                    return request(place, tokens)
            advance()
            return None

        asked = [request(place, job.tokens) for place, job in enumerate(jobs)]
        for _ in generate(self.target, asked, settings, follow):
            pass
        return [
            Said(
                *(job.index, job.sample, turn, job.temperature, job.prompt.category or ""),
                is_held_out(job.prompt),
                answer,
            )
            for job, answers in zip(jobs, said, strict=True)
            for turn, answer in enumerate(answers)
        ]


Run = Callable[[Sequence[Open], int, SynthesizeConfig, Path, tuple[int, ...]], int]
"""(shards to make, cache slots, configuration, folder, feature layers) -> answer tokens added."""


def synthesize(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    folder: Path,
    config: SynthesizeConfig,
    excluded: Excluded | None = None,
    layers: tuple[int, ...] = (),
    say: Say = lambda line: None,
    run: Run | None = None,
) -> int:
    """Answers `prompts` into `folder`; returns how many answer tokens this call added.

    Shards that are there already are kept, so a killed run goes on where it stopped. `run` makes
    them elsewhere than in this process. Raises ForerunError where the folder holds data of other
    prompts or another configuration, or the disk is too small.
    """
    plan = make_plan(checkpoint, prompts, excluded or Excluded(), config)
    say(_kept(len(prompts), plan))
    room = config.room(checkpoint)
    manifest = _manifest(checkpoint, plan, config)
    if (folder / MANIFEST).exists():
        _check(folder / MANIFEST, manifest)
        remove_parts(folder)
    missing = [
        Open(number, jobs)
        for number, jobs in enumerate(plan.shards)
        if not _complete(shard_path(folder, number), layers)
    ]
    found = len(plan.shards) - len(missing)
    say(f"{len(plan.shards)} shards" + (f", {found} of them there already" if found else ""))
    if not missing:
        return 0
    _check_space(folder, _bytes_left(folder, missing, room, config, checkpoint, layers), say)
    write_whole(folder / MANIFEST, lambda part: part.write_text(json.dumps(manifest, indent=1)))
    slots = capacity(plan, room, config)
    if run is not None:
        return run(missing, slots, config, folder, layers)
    block = Block.of(checkpoint, slots, folder, config, layers)
    with progress("answering", sum(len(shard.jobs) for shard in missing)) as advance:
        return sum(block.make(shard, advance) for shard in missing)


def _complete(path: Path, layers: tuple[int, ...]) -> bool:
    return path.exists() and (not layers or has_features(path, layers))


def _kept(asked: int, plan: Plan) -> str:
    dropped = ", ".join(f"{count} {name}" for name, count in plan.dropped.items() if count)
    return (
        f"{asked} prompts, {plan.prompts} kept ({plan.held_out} of them held out by hash), "
        f"dropped: {dropped or 'none'}"
    )


def _bytes_left(
    folder: Path,
    missing: Sequence[Open],
    room: int,
    config: SynthesizeConfig,
    checkpoint: Checkpoint,
    layers: tuple[int, ...],
) -> dict[str, int]:
    """Bytes that are still to be written, at most, by part."""
    hidden = checkpoint.config.hidden_size
    unsaid = [shard for shard in missing if not shard_path(folder, shard.number).exists()]
    texts = sizes([job for shard in unsaid for job in shard.jobs], room, config, hidden, 0)
    all_jobs = [job for shard in missing for job in shard.jobs]
    return texts | {"features": sizes(all_jobs, room, config, hidden, len(layers))["features"]}


def _check_space(folder: Path, parts: dict[str, int], say: Say) -> None:
    """Says how much will be written, at most; ForerunError where the disk has less."""
    home = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    total, free = sum(parts.values()), shutil.disk_usage(home).free
    shown = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    say(f"to write: at most {_size(total)} ({shown}); {_size(free)} are free")
    if total > free:
        raise ForerunError(
            f"{folder}: up to {_size(total)} to write, but {_size(free)} are free on that disk: "
            "make room, or ask for fewer answers, features or log-probabilities"
        )


def _size(count: int) -> str:
    """Bytes for people."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def _manifest(checkpoint: Checkpoint, plan: Plan, config: SynthesizeConfig) -> dict[str, Any]:
    manifest = {
        "target": checkpoint.name,
        "target_digest": checkpoint.digest,
        **asdict(config),
        "prompts": plan.prompts,
        "held_out": plan.held_out,
        "dropped": plan.dropped,
        "prompts_digest": plan.digest,
    }
    read_back: dict[str, Any] = json.loads(json.dumps(manifest))  # tuples become lists
    return read_back


def _check(path: Path, manifest: dict[str, Any]) -> None:
    """Raises ForerunError where the manifest that is there is of other data."""
    try:
        # What no device was named in was made by versions that had no other.
        found = {"device": "cpu"} | json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ForerunError(f"{path}: can't read it ({error}): choose another folder") from None
    for key in (*manifest, *found):
        if found.get(key) != manifest.get(key):
            raise ForerunError(
                f"{path}: made with {key} {found.get(key)!r}, now {manifest.get(key)!r}: "
                "repeat the first run's settings, or choose another folder"
            )
