"""A Hugging Face folder -> a checkpoint: safetensors, tokenizer.json and their JSON neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint, digest_files
from forerun.models.config import TargetConfig
from forerun.models.hf_config import Fields, config_from_json, read_json
from forerun.models.stored import StoredWeights
from forerun.models.weights import Shape, check_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    _INDEX,
)


def checkpoint_from_folder(folder: Path) -> Checkpoint:
    """The checkpoint in the Hugging Face folder `folder`; nothing in it is executed.

    Raises ForerunError where files are missing, damaged, pickled or at odds with one another, or
    the architecture is not supported.
    """
    values = read_json(_required(folder, "config.json"))
    config = config_from_json(values, str(folder / "config.json"))
    tokenizer = _tokenizer(_required(folder, "tokenizer.json"))
    settings = _optional_json(folder, "tokenizer_config.json")
    bos, eos = (_token_text(settings, name) for name in ("bos_token", "eos_token"))
    shards = find_shards(folder)
    return Checkpoint(
        name=folder.resolve().name,
        config=config,
        weights=_weights(shards, config, str(folder)),
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, settings),
        bos_token=bos,
        eos_token=eos,
        stop_ids=_stop_ids(folder, values, tokenizer, eos),
        add_bos=_adds_bos(settings, tokenizer, bos),
        digest=digest_files(
            [*shards, *(folder / name for name in _SIDE_FILES if (folder / name).is_file())]
        ),
    )


def find_shards(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: the single one, or those that its index names."""
    if (folder / _INDEX).is_file():
        index = Fields(read_json(folder / _INDEX), str(folder / _INDEX))
        return [_shard(folder, name) for name in _shard_names(index)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickled = sorted((*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    if pickled:
        raise ForerunError(
            f"{folder} has only pickled weights ({pickled[0].name}), which can run code when "
            "loaded: convert them to safetensors (transformers' save_pretrained does)"
        )
    raise ForerunError(f"{folder} has neither {_SINGLE} nor {_INDEX}: download it again")


def _shard_names(index: Fields) -> list[str]:
    names = index.table("weight_map").values()
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong or not names:
        raise index.error("weight_map", "tensor names and their files", wrong or None)
    return sorted(set(names))


def _shard(folder: Path, name: str) -> Path:
    # A bare name only: symbolic links stay allowed, because the Hugging Face cache is made of them.
    if Path(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
        raise ForerunError(
            f"{folder / _INDEX} names the shard {name!r}, which is no .safetensors file inside "
            "the folder: do not trust this checkpoint"
        )
    if not (folder / name).is_file():
        raise ForerunError(
            f"{folder} lacks the shard {name!r} that its index names: download it again"
        )
    return folder / name


def _weights(shards: Iterable[Path], config: TargetConfig, where: str) -> StoredWeights:
    """Every tensor of the target, checked by name, shape and type; none is read yet."""
    shapes: dict[str, Shape] = {}
    homes: dict[str, tuple[Path, Any]] = {}
    for shard in shards:
        opened = _open(shard)
        for name in opened.keys():  # noqa: SIM118 - a file handle, not a dict
            shapes[name] = tuple(opened.get_slice(name).get_shape())
            homes[name] = shard, opened
    readers = {}
    for name in check_shapes(shapes, config, where):
        shard, opened = homes[name]
        kind = opened.get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise ForerunError(
                f"{shard} has the tensor {name!r} of type {kind}, supported are "
                f"{', '.join(sorted(_FLOATS))}: use the unquantised checkpoint"
            )
        readers[name] = partial(opened.get_tensor, name)
    return StoredWeights(readers)


def _open(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ForerunError(
            f"{shard} is truncated or no safetensors file ({error}): download it again"
        ) from None


def _tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        reason = str(error).partition("\n")[0]
        raise ForerunError(f"{path} is not a tokenizer ({reason}): download it again") from None
    # Saved training settings would cut or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _chat_template(folder: Path, settings: Fields) -> str | None:
    """The template file, else the setting: a text, or named ones with `default` before others."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ForerunError(f"{file} is not readable text ({error}): correct it") from None
    template = settings.values.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    named: dict[str, str] = {
        entry["name"]: entry["template"]
        for entry in (template if isinstance(template, list) else ())
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    if not named:
        raise settings.error("chat_template", "a text or a list of name and template", template)
    return named.get("default", next(iter(named.values())))


def _token_text(settings: Fields, name: str) -> str | None:
    """A special token's text, given as such or as an object with `content`."""
    value = settings.values.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise settings.error(name, "a token's text", value)
    return value


def _stop_ids(
    folder: Path, values: dict[str, Any], tokenizer: Tokenizer, eos: str | None
) -> tuple[int, ...]:
    """The stop ids of generation_config.json, else config.json, and the tokenizer's own."""
    source = _optional_json(folder, "generation_config.json")
    if source.values.get("eos_token_id") is None:
        source = Fields(values, str(folder / "config.json"))
    found = source.values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in ids):
        raise source.error("eos_token_id", "a token id or a list of them", found)
    own = None if eos is None else tokenizer.token_to_id(eos)
    return tuple(sorted({*ids, *(() if own is None else (own,))}))


def _adds_bos(settings: Fields, tokenizer: Tokenizer, bos: str | None) -> bool:
    """Whether a text starts with a BOS: as the settings say, else as the tokenizer does."""
    index = None if bos is None else tokenizer.token_to_id(bos)
    if index is None:
        return False
    if settings.values.get("add_bos_token") is not None:
        return settings.flag("add_bos_token")
    return tokenizer.encode("a").ids[:1] == [index]


def _required(folder: Path, name: str) -> Path:
    if (folder / name).is_file():
        return folder / name
    mend = {
        "tokenizer.json": "save it with transformers' AutoTokenizer(...).save_pretrained",
        "config.json": "give the folder of a whole Hugging Face checkpoint, or a .gguf file",
    }
    raise ForerunError(f"{folder} lacks {name}: {mend[name]}")


def _optional_json(folder: Path, name: str) -> Fields:
    path = folder / name
    return Fields(read_json(path) if path.is_file() else {}, str(path))
