"""The one target in the forms that the engines load: its file, a Hugging Face folder, int4 ONNX."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ForerunError
from forerun.models.checkpoint import SHIPPED, Checkpoint, digest_files, shipped_file

from .environment import Environment, last_line, worker_variables
from .registry import Source

COMPLETE = "complete"
"""A file that a folder made here gets last: without it the folder is made again."""


@dataclass(frozen=True)
class Preparation:
    """Where the target lies, and where what is made of it goes."""

    bundle: Path
    target: str
    """As for `forerun compile`."""
    folder: Path
    peers: Environment

    def path(self, source: Source) -> Path:
        """The target as `source`, made where it is not there yet; ForerunError: it can't be."""
        return _SOURCES[source](self)


def gguf_file(given: Preparation) -> Path:
    """The target's GGUF file."""
    if given.target in SHIPPED:
        return shipped_file(given.target)
    path = Path(given.target)
    if path.suffix == ".gguf" and path.is_file():
        return path
    raise ForerunError(f"the target {given.target!r} is no GGUF file, which this engine reads")


def hugging_face_folder(given: Preparation) -> Path:
    """The target's folder; of a GGUF file, one with its weights dequantised to float32."""
    if Path(given.target).is_dir():
        return Path(given.target)
    source = gguf_file(given)
    made = given.folder / f"folder-{digest_files([source])[:12]}"
    words = [sys.executable, "-m", "benchmarks.peers.prepare", given.target, str(made)]
    return _make(made, words)


def int4_folder(given: Preparation) -> Path:
    """ONNX Runtime GenAI's own int4 model for a CPU, with its builder's default settings."""
    source = hugging_face_folder(given)
    made = given.folder / f"int4-{digest_files(source.glob('*.safetensors'))[:12]}"
    words = [str(given.peers.python), "-m", "onnxruntime_genai.models.builder", "-p", "int4"]
    words += ["-e", "cpu", "-i", str(source), "-o", str(made), "-c", str(made / "cache")]
    return _make(made, words)


_SOURCES: dict[Source, Callable[[Preparation], Path]] = {
    "bundle": lambda given: given.bundle,
    "gguf": gguf_file,
    "folder": hugging_face_folder,
    "int4": int4_folder,
}


def _make(folder: Path, words: list[str]) -> Path:
    """`folder`, once the command that makes it was successful."""
    if not (folder / COMPLETE).exists():
        print(f"making {folder}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(words, capture_output=True, env=worker_variables(2))
        if done.returncode:
            raise ForerunError(f"{folder} can't be made: {last_line(done.stderr)}")
        (folder / COMPLETE).touch()
    return folder


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """A checkpoint of the Llama architecture as transformers reads it."""
    import torch

    from forerun.models.draft_folder import save_draft_model
    from forerun.models.drafter_folder import write_text

    if checkpoint.config.architecture != "llama":
        raise ForerunError(
            f"a GGUF file of the architecture {checkpoint.config.architecture!r} can't be made a "
            "folder here: give the target's Hugging Face folder"
        )
    every = torch.arange(checkpoint.config.vocab_size)
    texts = {"bos_token": checkpoint.bos_token, "eos_token": checkpoint.eos_token}
    ids = {
        f"{name}_id": checkpoint.tokenizer.token_to_id(text) for name, text in texts.items() if text
    }
    save_draft_model(folder, checkpoint.config, checkpoint.weights, every, checkpoint, ids)
    generation = {**ids, "eos_token_id": list(checkpoint.stop_ids)}
    write_text(folder / "generation_config.json", json.dumps(generation))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": checkpoint.add_bos,
        "chat_template": checkpoint.chat_template,
        **texts,
    }
    write_text(folder / "tokenizer_config.json", json.dumps(settings))


if __name__ == "__main__":
    from forerun.models.checkpoint import load_checkpoint

    write_checkpoint(load_checkpoint(sys.argv[1]), Path(sys.argv[2]))
