"""What a bundle says about itself: `manifest.json` as frozen dataclasses, read strictly."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from forerun.errors import ForerunError
from forerun.runtime import strict
from forerun.runtime.plan import Plan
from forerun.runtime.tree import Tree

CONTRACT = 2
"""Version of the step contract: what the engine's inputs, outputs and state mean."""


@dataclass(frozen=True)
class TargetFacts:
    """The target as the loop needs to know it."""

    name: str
    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    stop_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    """Whether a raw prompt (no chat template) starts with `bos_token`."""
    digest: str = ""
    """Hash of the checkpoint's files."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "num_kv_heads", "head_dim", "max_positions"):
            _at_least_one(getattr(self, name), name)
        for stop in self.stop_ids:
            if not 0 <= stop < self.vocab_size:
                raise ForerunError(f"stop_ids: {stop} is not one of {self.vocab_size} token ids")


@dataclass(frozen=True)
class StateFacts:
    """A drafter's state: the engine's input `name`, whose next value is its output `new_name`."""

    name: str
    cache: bool
    """Written in place: input and output share their memory."""


@dataclass(frozen=True)
class DrafterFacts:
    """The drafter: its kind in the registry ("plain", "ngram", ...), and facts to print."""

    kind: str
    name: str
    options: dict[str, int | float | str]
    states: tuple[StateFacts, ...] = ()
    tables: int = 1
    """Uniforms that a step reads for each position."""
    digest: str = ""
    """Hash of the drafter's files."""
    candidates: int = 0
    """Tokens that it proposes: slots of a tree's nodes go up to it."""
    per_depth: int = 1
    """Candidates for each depth, side by side; those of a grown tree have no fixed depth."""


@dataclass(frozen=True)
class EngineFacts:
    """What runs the step: `file` is the bundle's file that the engine opens."""

    kind: str
    file: str
    devices: tuple[str, ...]
    """The GPUs (`sm_89`) that a TensorRT engine was built for, where they were named."""
    versions: dict[str, str]
    graph: str = "model.onnx"
    """The ONNX file that `file` was built from, or is."""
    refit: bool = False
    """Whether the drafter's weights in a TensorRT engine may be replaced."""


@dataclass(frozen=True)
class FileFacts:
    """One file of the bundle: its hash in lower-case hexadecimal, its size in bytes."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ForerunError("sha256: not 64 lower-case hexadecimal digits")
        if self.bytes < 0:
            raise ForerunError(f"bytes: {self.bytes} is negative")


@dataclass(frozen=True)
class Manifest:
    """The whole of `manifest.json`.

    `capacity` counts KV slots, `pending` is P (rows of an uncommitted path), `chunk` the tokens of
    one prefill call. `trees` are the draft trees that the engine was built for, keyed by their
    number of nodes as text, null where the drafter grows another one each step; "1" (plain
    decoding) is always among them. `recipe` is the content hash
    of all that went into the bundle, `setting` of all but the drafter; `files` says what came out,
    by path inside the bundle; `plan` is there once the bundle was tuned.
    """

    contract: int
    forerun: str
    target: TargetFacts
    drafter: DrafterFacts
    engine: EngineFacts
    precision: str
    capacity: int
    pending: int
    chunk: int
    trees: dict[str, Tree | None]
    default_tree: str
    recipe: str
    setting: str = ""
    files: dict[str, FileFacts] = field(default_factory=dict)
    plan: Plan | None = None

    def __post_init__(self) -> None:
        _check_contract(self.contract)
        for name in ("capacity", "pending", "chunk"):
            _at_least_one(getattr(self, name), name)
        for key, tree in self.trees.items():
            if tree is None:
                if not (key.isdecimal() and key == str(int(key)) and int(key) > 1):
                    raise ForerunError(f"trees.{key}: not a number of nodes that can be grown")
                continue
            if key != str(tree.nodes):
                raise ForerunError(f"trees.{key}: this tree has {tree.nodes} nodes")
            if tree.depth >= self.pending:
                raise ForerunError(
                    f"trees.{key}: depth {tree.depth} needs pending {tree.depth + 1}, "
                    f"which is {self.pending}"
                )
        if "1" not in self.trees:
            raise ForerunError("trees: the tree '1' (plain decoding) is missing")
        if self.default_tree not in self.trees:
            raise ForerunError(f"default_tree: {self.default_tree!r} is not among the trees")
        for nodes in self.plan.sizes if self.plan else ():
            if str(nodes) not in self.trees:
                raise ForerunError(f"plan: no tree of {nodes} nodes: run forerun tune again")

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "manifest.json") -> Manifest:
        """Reads `to_json`'s text; raises ForerunError naming `where` and the field at fault."""
        try:
            data = strict.parse(text)
            if isinstance(data, dict) and isinstance(data.get("contract"), int):
                # Before anything else: another contract may well have other fields.
                _check_contract(data["contract"])
            manifest = strict.decode(cls, data)
        except ForerunError as error:
            hint = "" if "compile the bundle again" in str(error) else ": compile the bundle again"
            raise ForerunError(f"{where}: {error}{hint}") from None
        assert isinstance(manifest, cls)
        return manifest


def _check_contract(contract: int) -> None:
    if contract != CONTRACT:
        raise ForerunError(
            f"contract: the bundle follows step contract {contract} but this forerun follows "
            f"{CONTRACT}: compile the bundle again"
        )


def _at_least_one(value: int, name: str) -> None:
    if value < 1:
        raise ForerunError(f"{name}: {value} is less than 1")
