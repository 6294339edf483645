"""What a bundle says about itself: `manifest.json` as frozen dataclasses, read strictly."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from forerun.errors import ForerunError
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
    by path inside the bundle.
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

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "manifest.json") -> Manifest:
        """Reads `to_json`'s text; raises ForerunError naming `where` and the field at fault."""
        try:
            data = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ForerunError(f"{where}: not JSON: {error}: compile the bundle again") from None
        try:
            if isinstance(data, dict) and isinstance(data.get("contract"), int):
                # Before anything else: another contract may well have other fields.
                _check_contract(data["contract"])
            manifest = _decode(cls, data, "")
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


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _decode(kind: Any, value: Any, at: str) -> Any:
    """`value`, as parsed from JSON, checked against the annotation `kind`; `at` is its field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        # By exact type, so that a bool is no int and an int stays one where a float would do.
        if any(type(value) is option for option in arguments):
            return value
        if len(arguments) == 2 and type(None) in arguments:
            return _decode(arguments[0], value, at)
    elif origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {key: _decode(arguments[1], item, f"{at}.{key}") for key, item in value.items()}
    elif is_dataclass(kind) and isinstance(value, dict):
        return _decode_fields(kind, value, at)
    elif type(value) is kind:
        return value
    raise ForerunError(f"{at or 'the whole'}: expected {_name(kind)}, found {_brief(value)}")


def _decode_fields(kind: Any, value: dict[str, Any], at: str) -> Any:
    prefix = f"{at}." if at else ""
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    for name in names:
        if name not in value:
            raise ForerunError(f"{prefix}{name}: missing")
    for name in value:
        if name not in names:
            raise ForerunError(f"{prefix}{_brief(name)}: unknown field")
    decoded = {name: _decode(hints[name], value[name], f"{prefix}{name}") for name in names}
    try:
        return kind(**decoded)
    except ForerunError as error:
        raise ForerunError(f"{prefix}{error}" if at else str(error)) from None


def _name(kind: Any) -> str:
    if is_dataclass(kind) or get_origin(kind) is dict:
        return "an object"
    return "a list" if get_origin(kind) is tuple else getattr(kind, "__name__", str(kind))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
