"""Shards made by the processes of a Ray cluster: Ray Data's actors, each with its own target.

The folder must be one that all nodes share. A shard is made by `forerun.training.synthesize.Block`
here as elsewhere, and only its number comes back.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, MissingDependencyError
from forerun.models.checkpoint import Checkpoint
from forerun.progress import progress
from forerun.runtime.prompts import Prompt
from forerun.training.plan import Job, SynthesizeConfig
from forerun.training.synthesize import Block, Open, Run

KNOCK_SECONDS = 10.0


def ray_run(load: Callable[[], Checkpoint]) -> Run:
    """A `run` for `synthesize` on the cluster that RAY_ADDRESS names, or on a local one.

    Its workers load the target by `load`; each takes as many CPUs as a shard has threads, and a
    GPU where that is the device. Raises MissingDependencyError without Ray.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingDependencyError("ray[data]", "ray", "--ray") from None

    def run(
        shards: Sequence[Open],
        slots: int,
        config: SynthesizeConfig,
        folder: Path,
        layers: tuple[int, ...],
    ) -> int:
        _connect(ray)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        # Fewer CPUs are slower, and give the same.
        threads = min(config.threads, max(int(node.get("CPU", 0)) for node in nodes))
        needs = {"CPU": threads} | ({"GPU": 1} if config.device == "cuda" else {})
        count = min(sum(_workers(node, needs) for node in nodes), len(shards))
        if not count:
            raise ForerunError("--device cuda: no GPU in the Ray cluster: choose --device cpu")
        rows = [{"number": shard.number, "jobs": _packed(shard.jobs)} for shard in shards]
        made = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            _Worker,
            fn_constructor_args=(load, slots, str(folder.absolute()), config, layers),
            concurrency=count,
            num_cpus=threads,
            num_gpus=needs.get("GPU"),
        )
        added = 0
        try:
            with progress("shards answered", len(shards)) as advance:
                for row in made.iter_rows():
                    added += row["added"]
                    advance()
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise ForerunError(f"a Ray worker failed: {cause}") from error
        return added

    return run


def _workers(node: Mapping[str, float], needs: Mapping[str, int]) -> int:
    """How many workers that take `needs` a node has room for."""
    return min(int(node.get(name, 0)) // amount for name, amount in needs.items())


def _connect(ray: Any) -> None:
    """Joins the cluster, or starts one here that reports nothing to anybody."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        _knock(address)
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise ForerunError(
            f"can't reach the Ray cluster {address!r}: {error}: "
            "correct RAY_ADDRESS, or unset it for a local one"
        ) from None


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at `host:port`; `auto` and `local` are Ray's to find.

    Ray itself would go on trying for minutes.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()


class _Worker:
    """An actor that holds the target and makes one shard after the other."""

    def __init__(
        self,
        load: Callable[[], Checkpoint],
        slots: int,
        folder: str,
        config: SynthesizeConfig,
        layers: tuple[int, ...],
    ) -> None:
        self.block = Block.of(load(), slots, Path(folder), config, layers)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard = Open(int(row["number"]), _unpacked(row["jobs"]))
        return {"number": shard.number, "added": self.block.make(shard)}


def _packed(jobs: Sequence[Job]) -> str:
    """Jobs as JSON: a prompt's messages have no common columns."""
    return json.dumps([asdict(job) for job in jobs])


def _unpacked(packed: str) -> tuple[Job, ...]:
    return tuple(_job(**values) for values in json.loads(packed))


def _job(prompt: dict[str, Any], tokens: list[int], **rest: Any) -> Job:
    messages = prompt["messages"]
    parts = {
        "messages": None if messages is None else tuple(messages),
        "later": tuple(prompt["later"]),
        "tools": tuple(prompt["tools"]),
    }
    return Job(prompt=Prompt(**(prompt | parts)), tokens=tuple(tokens), **rest)
