"""The environment that the other engines are installed into, apart from this project's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"

GROUPS: dict[str, tuple[str, ...]] = {
    # torch first, at the version that constraints.txt pins: nothing after it asks for another.
    "transformers": ("torch", "transformers"),
    "onnxruntime-genai": ("onnxruntime-genai", "onnxruntime", "onnx", "onnx-ir"),
    "openvino-genai": ("openvino-genai",),
    "llama-cpp-python": ("llama-cpp-python",),
}
"""What `pip install` is given, a peer at a time: where one can't be installed, the others are."""

FLAGS = {
    "GGML_NATIVE": "ON",
    **dict.fromkeys(("LLAVA_BUILD", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER"), "OFF"),
    **dict.fromkeys(("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES"), "OFF"),
    "CMAKE_CXX_FLAGS": "'-fno-tree-dse -fno-dse -fno-strict-aliasing'",
}
"""llama-cpp-python is compiled: for this very processor, and no more of it than is run. On one with
AMX, gcc 12 otherwise drops the writes to the tile configuration (its `_tile_loadconfig` claims to
read eight bytes), and the first matmul is a segmentation fault (llama.cpp's issue 20824)."""

LIST = """
import importlib.metadata, json
print(json.dumps({found.name: found.version for found in importlib.metadata.distributions()}))
"""


@dataclass(frozen=True)
class Environment:
    """A Python with the peers' packages."""

    python: Path

    @classmethod
    def at(cls, folder: Path) -> Environment:
        """The virtual environment in `folder`."""
        return cls(folder / ("Scripts" if os.name == "nt" else "bin") / "python")

    def installed(self) -> dict[str, str]:
        """Name and version of every package; none where there is no such environment."""
        if not self.python.exists():
            return {}
        listed = subprocess.run([self.python, "-c", LIST], check=True, capture_output=True)
        found: dict[str, str] = json.loads(listed.stdout)
        # A wheel may spell its name with other separators than those it is asked for with.
        return {re.sub("[-_.]+", "-", name).lower(): found[name] for name in found}

    def install(self) -> dict[str, str]:
        """Makes the environment and installs every peer; -> why those failed that did."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.python.parents[1]], check=True)
        failed = {}
        for name, packages in GROUPS.items():
            print(f"installing {', '.join(packages)}", flush=True)
            words = [str(self.python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            words += ["-c", str(CONSTRAINTS), *packages]
            flags = {"CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in FLAGS.items())}
            done = subprocess.run(words, env={**flags, **os.environ}, stderr=subprocess.PIPE)
            if done.returncode:
                failed[name] = last_line(done.stderr)
        return failed


def last_line(output: bytes) -> str:
    """What a failed process said last."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def worker_variables(threads: int) -> Mapping[str, str]:
    """The environment variables of a worker: so many threads, and nothing fetched."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {
        **os.environ,
        **offline,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
