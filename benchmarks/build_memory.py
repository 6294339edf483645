"""What memory a TensorRT-RTX build takes, stage by stage, for targets of an 8B model's layers.

    python benchmarks/build_memory.py OUT.json [--layers 1 2 4] [--vocabulary 4096]
        [--precision fp16] [--tree 6] [--drafter plain]

Targets of random weights are written one after the other, compiled in a process of its own, and
deleted. What a stage takes at its peak is nearly a straight line: a fixed part and so many bytes a
byte of weights, which the file of 16 bit numbers counts. `anonymous` is memory that nothing but the
process holds; `resident` has the files that are mapped too, which the system may drop again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from forerun.models.hf_config import config_from_json
from forerun.models.weights import tensor_shapes

MIB = 1 << 20
PERIOD = 0.05
"""Seconds between two looks at a process."""
Peaks = dict[str, dict[str, int]]
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "torch_dtype": "float16",
}
"""Llama-3-8B's, but for the number of layers and the vocabulary."""


def write_target(folder: Path, layers: int, vocabulary: int) -> int:
    """A checkpoint of random float16 weights, a tensor at a time; -> bytes of its weights."""
    folder.mkdir(parents=True)
    config = SHAPE | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(config))
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    shapes = dict(tensor_shapes(config_from_json(config, "config.json")))
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    draw = torch.Generator().manual_seed(0)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            scale, base = (0.0, 1.0) if "norm" in name else (0.02, 0.0)
            tensor = torch.randn(*shape, generator=draw) * scale + base
            stream.write(tensor.half().numpy().data)
    return end


def compile_one(target: str, output: str, precision: str, drafter: str, trees: str) -> None:
    """In a process of its own: a line on standard output as each stage begins."""
    from forerun.compiler.options import CompileOptions
    from forerun.compiler.pipeline import compile_bundle

    options = CompileOptions(
        target=target,
        output=Path(output),
        drafter=drafter,
        engine="tensorrt-rtx",
        precision=precision,
        trees=tuple(map(int, trees.split(","))),
    )
    compile_bundle(options, lambda line: print(line, flush=True))


def watched(command: Sequence[str]) -> tuple[Peaks, float]:
    """(peak bytes of each stage of `command` by kind of memory, seconds)."""
    peaks: Peaks = {}
    stage = ["starting"]
    begun = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = child.stdout
    assert lines is not None

    def follow() -> None:
        for line in lines:
            stage.append(line.strip())

    Thread(target=follow, daemon=True).start()
    while child.poll() is None:
        known = peaks.setdefault(stage[-1], {"anonymous": 0, "resident": 0})
        for kind, size in memory(child.pid).items():
            known[kind] = max(known[kind], size)
        time.sleep(PERIOD)
    if child.returncode:
        raise SystemExit(f"failed, at {stage[-1]!r}: {child.returncode}")
    return peaks, time.monotonic() - begun


def memory(process: int) -> dict[str, int]:
    """Bytes that a process and those that it started hold."""
    found = {"anonymous": 0, "resident": 0}
    for number in family(process):
        try:
            status = Path(f"/proc/{number}/status").read_text()
        except OSError:  # it has just ended
            continue
        facts = dict(line.split(":", 1) for line in status.splitlines())
        for kind, field in (("anonymous", "RssAnon"), ("resident", "VmRSS")):
            found[kind] += int(facts.get(field, "0 kB").split()[0]) << 10
    return found


def family(process: int) -> list[int]:
    """`process` and its children."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        children = []
    return [process, *(number for child in children for number in family(int(child)))]


def measure(layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """One size: written, compiled, deleted."""
    with tempfile.TemporaryDirectory() as folder:
        target, output = Path(folder, "target"), Path(folder, "bundle")
        size = write_target(target, layers, options.vocabulary)
        code = "import sys, build_memory; build_memory.compile_one(*sys.argv[1:])"
        trees = ",".join(map(str, options.tree))
        words = [str(target), str(output), options.precision, options.drafter, trees]
        peaks, seconds = watched([sys.executable, "-c", code, *words])
        files = {path.name: path.stat().st_size for path in output.iterdir()}
    found = {"layers": layers, "weights": size, "seconds": seconds, "peaks": peaks, "files": files}
    print(f"{layers} layers, {size / MIB:.0f} MiB of weights, {seconds:.0f} s", flush=True)
    for stage, kinds in peaks.items():
        print(f"  {kinds['anonymous'] / MIB:8.0f} {kinds['resident'] / MIB:8.0f} MiB  {stage}")
    print(f"  engine {files['model.engine'] / MIB:.0f} MiB", flush=True)
    return found


def lines(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each stage's peak as fixed bytes and bytes a byte of weights, by least squares."""
    sizes = [run["weights"] for run in runs]
    found = {}
    for number, stage in enumerate(runs[0]["peaks"]):
        if any(len(run["peaks"]) != len(runs[0]["peaks"]) for run in runs):
            continue
        for kind in ("anonymous", "resident"):
            heights = [list(run["peaks"].values())[number][kind] for run in runs]
            slope, fixed = np.polyfit(sizes, heights, 1)
            found[f"{stage}, {kind}"] = {"fixed": float(fixed), "per_byte": float(slope)}
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--tree", type=int, nargs="+", default=[6])
    parser.add_argument("--drafter", default="ngram")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    runs = [measure(layers, options) for layers in options.layers]
    report: dict[str, Any] = {"runs": runs}
    if len(runs) > 1:
        report["lines"] = lines(runs)
        for name, line in report["lines"].items():
            print(f"{line['fixed'] / MIB:8.0f} MiB + {line['per_byte']:.2f} x weights  {name}")
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
