"""Prompts -> the target's own answers, in shards that survive a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint
from forerun.models.target import Target
from forerun.progress import progress
from forerun.runtime.chat import render_chat
from forerun.runtime.prompts import Prompt
from forerun.training.generate import Answer, GenerateConfig, Request, generate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HELD_OUT_PERCENT = 5
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SynthesizeConfig:
    """What shapes the answers; all of it is in the manifest, and a resumed run must agree."""

    max_new_tokens: int = 160
    max_prompt_tokens: int = 640
    """Longer prompts are skipped, and counted in the manifest."""
    temperature: float = 0.0
    greedy_share: float = 0.0
    """The share of prompts that are answered at temperature 0 all the same."""
    seed: int = 0
    shard: int = 64
    """Prompts in a shard."""
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Item:
    """A prompt's tokens and where its answer goes."""

    index: int
    prompt: tuple[int, ...]
    temperature: float
    category: str
    held_out: bool


def synthesize(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    folder: Path,
    config: SynthesizeConfig,
    batch: int = 192,
) -> int:
    """Answers `prompts` into `folder`; returns how many answer tokens this call added.

    Shards that are there already are kept, so a killed run goes on where it stopped. Raises
    ForerunError where the folder holds data of other prompts or another configuration.
    """
    items = [_item(checkpoint, prompt, index, config) for index, prompt in enumerate(prompts)]
    kept = [item for item in items if len(item.prompt) <= config.max_prompt_tokens]
    if not kept:
        raise ForerunError(
            f"no prompt has at most {config.max_prompt_tokens} tokens: raise max_prompt_tokens"
        )
    shards = [kept[start : start + config.shard] for start in range(0, len(kept), config.shard)]
    _write_manifest(folder, checkpoint, kept, len(items) - len(kept), config)
    open_shards = {i: shard for i, shard in enumerate(shards) if not _shard(folder, i).exists()}
    slots = max(len(item.prompt) for item in kept) + config.max_new_tokens
    capacity = -(-slots // 32) * 32
    target = Target(checkpoint.config, checkpoint.weights, capacity, "torch").eval()
    target.to(DTYPES[config.dtype])
    requests = [
        Request(item.index, item.prompt, item.temperature, _seed(config.seed, item.index))
        for shard in open_shards.values()
        for item in shard
    ]
    home = {item.index: i for i, shard in open_shards.items() for item in shard}
    answers: dict[int, dict[int, Answer]] = {i: {} for i in open_shards}
    settings = GenerateConfig(checkpoint.stop_ids, config.max_new_tokens, batch)
    added = 0
    with progress("answering", len(requests)) as advance:
        for answer in generate(target, requests, settings):
            number = home[answer.request.index]
            answers[number][answer.request.index] = answer
            added += len(answer.tokens)
            if len(answers[number]) == len(open_shards[number]):
                write_shard(_shard(folder, number), open_shards[number], answers.pop(number))
            advance()
    return added


def write_shard(path: Path, items: Sequence[Item], answers: dict[int, Answer]) -> None:
    """One file of prompts and answers; the name appears only once the content is complete."""
    sequences = [[*item.prompt, *answers[item.index].tokens] for item in items]
    states = torch.cat([answers[item.index].states for item in items])
    tensors = {
        "states": states.to(torch.bfloat16),
        "tokens": torch.tensor([*chain.from_iterable(sequences)], dtype=torch.int32),
        "lengths": torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(item.prompt) for item in items], dtype=torch.int32),
        "indices": torch.tensor([item.index for item in items], dtype=torch.int32),
        "temperatures": torch.tensor([item.temperature for item in items], dtype=torch.float32),
        "held_out": torch.tensor([item.held_out for item in items], dtype=torch.uint8),
    }
    part = path.with_suffix(".part")
    save_file(tensors, part, {"categories": json.dumps([item.category for item in items])})
    part.replace(path)


def is_held_out(prompt: Prompt) -> bool:
    """Whether a prompt belongs to the held-out part: by its last message, whatever precedes it."""
    text = prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"])
    key = " ".join(str(text).lower().split()).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def _item(checkpoint: Checkpoint, prompt: Prompt, index: int, config: SynthesizeConfig) -> Item:
    if prompt.text is not None and checkpoint.chat_template is None:
        text = (checkpoint.bos_token or "") * checkpoint.add_bos + prompt.text
    elif checkpoint.chat_template is None:
        raise ForerunError(f"{checkpoint.name}: no chat template: give plain prompts")
    else:
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        text = render_chat(
            checkpoint.chat_template, messages, checkpoint.bos_token, checkpoint.eos_token
        )
    ids = tuple(checkpoint.tokenizer.encode(text, add_special_tokens=False).ids)
    greedy = _seed(config.seed, index) % 1000 < 1000 * config.greedy_share
    temperature = 0.0 if greedy else config.temperature
    return Item(index, ids, temperature, prompt.category or "", is_held_out(prompt))


def _seed(seed: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def _write_manifest(
    folder: Path, checkpoint: Checkpoint, items: Sequence[Item], skipped: int, config: Any
) -> None:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.index, item.prompt, item.temperature)).encode())
    manifest = {
        "target": checkpoint.name,
        "target_digest": checkpoint.digest,
        "prompts": len(items),
        "prompts_digest": digest.hexdigest(),
        "skipped": skipped,
        **asdict(config),
    }
    path = folder / MANIFEST
    if path.exists():
        found = json.loads(path.read_text())
        for key in sorted(manifest.keys() | found.keys()):
            if found.get(key) != manifest.get(key):
                raise ForerunError(
                    f"{path}: made with {key} {found.get(key)!r}, now {manifest.get(key)!r}: "
                    "repeat the first run's settings, or choose another folder"
                )
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(manifest, indent=1))
    part.replace(path)


def shard_files(folder: Path) -> Iterator[Path]:
    """The finished shards of a data folder, in order. Raises ForerunError where there are none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ForerunError(f"{folder}: no data in it: make some with forerun synthesize")
    yield from found
