"""What a machine with a CUDA device shows that one without cannot, in one file of JSON.

    python benchmarks/gpu_check.py OUT.json [--skip NAME ...]

Each check stands by itself: one that fails is written down as an error, and the next one runs. It
takes what is installed of triton, torch, onnxruntime-gpu, tensorrt-rtx, tensorrt. Without a device
only the checks that need none run, and the exit status is 0. No device was at hand when this was
written: the checks that need one have not been run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.compiler.functions import FUNCTIONS, LocalFunction
from forerun.compiler.launch import Launch
from forerun.compiler.plugins import Limits
from forerun.models.config import RopeConfig, TargetConfig
from forerun.models.ops import scatter_in_place
from forerun.models.target import Caches, Rows, Target
from forerun.models.tree_attention import TreeView, pack_ancestors
from forerun.runtime.cuda import device_count
from forerun.runtime.doctor import examine

PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
LIMITS = Limits(nodes=64, slots=4096)
ROUNDS = 20
Report = dict[str, Any]
Run = Callable[[Launch, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Check:
    """One of the checks: `run(folder)` gives what goes into the report."""

    run: Callable[[Path], Report]
    needs_device: bool


# --- kernels ----------------------------------------------------------------------------------


def example(
    name: str, device: str, dtype: torch.dtype, nodes: int = 8
) -> tuple[list[Any], list[Any]]:
    """(tensors, constants) for the function `name`, of an 8B model's sizes but its vocabulary."""
    draw = torch.Generator().manual_seed(nodes)

    def real(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=draw).to(kind)

    def chain() -> Tensor:
        return torch.ones(1, nodes, nodes, dtype=torch.bool).tril()

    places, flat = torch.arange(nodes)[None], torch.float32
    scores = -torch.arange(3.0 * nodes)[None]
    heads, kv_heads, slots, dim = 32, 8, LIMITS.slots, 128
    tensors, constants = {
        "ChooseTokens": (
            [
                real(1, nodes, 32000) * 3,
                *(torch.tensor([setting]) for setting in (0.8, 50, 0.9)),
                torch.rand(1, nodes, generator=draw),
            ],
            [],
        ),
        "AcceptPath": (
            [
                *(places + 1, places + 2, places, chain(), places[0]),
                (places - 1).clamp(min=0),
                torch.tensor([nodes]),
            ],
            [nodes],
        ),
        "CommitRows": ([places, real(1, 2 * 32 * kv_heads, nodes, dim)], []),
        "TreeAttention": (
            [
                real(1, heads, nodes, dim),
                real(1, kv_heads, slots, dim),
                real(1, kv_heads, slots, dim),
                *(torch.tensor([slots - 100]), torch.tensor([slots - 90])),
                pack_ancestors(chain()),
            ],
            [dim**-0.5],
        ),
        "ExpandColumns": ([distinct(nodes, dtype), torch.zeros(1, nodes), places], [8]),
        "KeepNodes": ([torch.arange(64)[None], real(1, 64, kind=flat)], [9, 8]),
        "PruneTree": (
            [
                *(torch.tensor([5]), torch.arange(3 * nodes)[None]),
                *(torch.zeros_like(scores).long(), scores, places[0]),
            ],
            [4],
        ),
    }[name]
    return [tensor.contiguous().to(device) for tensor in tensors], constants


def distinct(nodes: int, dtype: torch.dtype) -> Tensor:
    """Logits whose largest are told apart in any type: torch leaves the order of ties open."""
    logits = torch.full((1, nodes, 32000), -4.0)
    for place in range(nodes):
        logits[0, place, 400 * place : 400 * place + 10] = torch.arange(10.0)
    return logits.to(dtype)


def compare(
    function: LocalFunction, device: str, dtype: torch.dtype, nodes: int, run: Run = Launch.run
) -> float:
    """The largest difference between the kernels' outputs and the function's meaning."""
    from forerun.compiler.plans import run_kernels

    tensors, constants = example(function.name, device, dtype, nodes)
    found = run_kernels(function.name, tensors, constants, LIMITS, run)
    exact = [t.float() if t.is_floating_point() else t for t in (t.cpu() for t in tensors)]
    expected = function.meaning(*exact, *constants)
    pairs = zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True)
    return max(float((a.cpu().float() - b.float()).abs().max()) for a, b in pairs)


def interpreted_kernels(folder: Path) -> Report:
    """Every kernel in Triton's interpreter, in a process that starts with it."""
    code = (
        "import json, sys, torch; sys.path.insert(0, sys.argv[1]); import gpu_check as g;"
        "print(json.dumps({f.name: g.compare(f, 'cpu', torch.float32, 4) for f in g.FUNCTIONS}))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parent)]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])
    return {"largest_difference": json.loads(run.stdout.splitlines()[-1])}


def compiled_kernels(folder: Path) -> Report:
    """Registers, spills and shared memory of every kernel for this device, or sm_89."""
    from forerun.compiler.functions import Use
    from forerun.compiler.kernels import build_kernel
    from forerun.compiler.plans import PLANS
    from forerun.compiler.plugins import engine_ptx, kernels_of

    capability = capability_here()
    found: Report = {"capability": capability}
    for function in FUNCTIONS:
        tensors, constants = example(function.name, "cpu", torch.float16)
        plan = PLANS[function.name](Use.of(function, tensors, constants), LIMITS)
        for kernel in kernels_of(function.name, plan):
            binary = build_kernel(kernel.launch.form, capability)
            engine_ptx(binary, len(kernel.launch.arguments))
            facts = {"registers": binary.registers, "spilled": binary.spilled}
            found[kernel.name] = facts | {"shared": binary.shared}
    return found


def capability_here() -> int:
    """The device's, or one that any machine can compile for."""
    from forerun.runtime.cuda import compute_capability

    return compute_capability() if device_count() else 89


def kernels_on_device(folder: Path) -> Report:
    """Every kernel against its meaning, and attention's bandwidth against a copy's."""
    from forerun.compiler.plans import run_kernels

    found: Report = {
        function.name: {
            str(dtype).removeprefix("torch."): compare(function, "cuda", dtype, nodes)
            for dtype in (torch.float16, torch.bfloat16)
            for nodes in (1, 16, 64)
        }
        for function in FUNCTIONS
    }
    tensors, constants = example("TreeAttention", "cuda", torch.float16)
    moved = 2 * tensors[1].nbytes
    block = torch.empty(moved // 4, device="cuda")
    copy = captured_ms(lambda: block.clone())
    attend = captured_ms(lambda: run_kernels("TreeAttention", tensors, constants, LIMITS))
    found["attention_ms"], found["copy_ms_of_as_many_bytes"] = attend, copy
    found["attention_share_of_copy_bandwidth"] = copy / 2 / attend  # a copy reads and writes
    return found


def ptx_on_device(folder: Path) -> Report:
    """The PTX that an engine would carry, launched by the driver, against the meaning."""
    found = {f.name: compare(f, "cuda", torch.float16, 8, run_ptx) for f in FUNCTIONS}
    return {"largest_difference": found}


def run_ptx(launch: Launch, tensors: Mapping[str, Tensor]) -> None:
    """Launch the kernel's PTX, as an engine gets it, through the driver."""
    from cuda.bindings import driver

    from forerun.compiler.kernels import WARP, build_kernel
    from forerun.compiler.plugins import engine_ptx

    def call(status: Any, *results: Any) -> Any:
        if int(status):
            raise RuntimeError(f"CUDA driver: {status}")
        return results[0] if results else None

    binary = build_kernel(launch.form, capability_here())
    ptx = engine_ptx(binary, len(launch.arguments)).encode() + b"\0"
    module = call(*driver.cuModuleLoadData(ptx))
    entry = call(*driver.cuModuleGetFunction(module, binary.name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call(*driver.cuFuncSetAttribute(entry, most, binary.shared))
    given = [
        (int(launch.integers[name]), ctypes.c_int32)
        if name in launch.integers
        else (tensors[name].data_ptr(), ctypes.c_void_p)
        for name in launch.arguments
    ]
    values, types = zip(*given, strict=True)
    grid, block = map(int, launch.grid), (binary.warps * WARP, 1, 1)
    stream = torch.cuda.current_stream().cuda_stream
    call(*driver.cuLaunchKernel(entry, *grid, *block, binary.shared, stream, (values, types), 0))
    torch.cuda.synchronize()


def captured_ms(work: Callable[[], Any]) -> float:
    """Of one run of `work` on the device alone: ten of them in a CUDA graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    return milliseconds(graph.replay) / 10


def milliseconds(work: Callable[[], Any]) -> float:
    """The median of `ROUNDS` runs on the device."""
    work()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[ROUNDS // 2]


# --- a target of 8B's shape -------------------------------------------------------------------


def verify_cost(folder: Path) -> Report:
    """verify(n) of a target of an 8B model's shapes and random weights, under CUDA graphs."""
    # Weights are there twice while the target is made.
    layers = 32 if torch.cuda.get_device_properties(0).total_memory > 40 << 30 else 8
    with torch.device("cuda"):
        target = big_target(layers)
    times = {n: forward_ms(target, n) for n in (1, 2, 4, 8, 16, 32, 64)}
    ratios = {n: ms / times[1] for n, ms in times.items()}
    return {"layers": layers, "milliseconds": times, "verify": ratios}


def forward_ms(target: Target, nodes: int, context: int = 1024) -> float:
    """One forward of `nodes` rows, captured once and replayed."""
    layers = target.config.num_layers
    with torch.device("cuda"):
        shape = (1, 8, 2048, 128)
        zeros = [torch.zeros(shape, dtype=torch.float16) for _ in range(2 * layers)]
        caches = Caches(zeros[:layers], zeros[layers:])
        length = torch.tensor([context])
        ancestors = torch.ones(1, nodes, nodes, dtype=torch.bool).tril()
        positions = length[:, None] + torch.arange(nodes)[None]
        pending = torch.zeros(1, 2 * layers * 8, 0, 128, dtype=torch.float16)
        tokens = torch.zeros(1, nodes, dtype=torch.int64)
    rows = Rows(positions, length, pending, TreeView(length, length, ancestors))

    @torch.no_grad()
    def run() -> None:
        target.head(target(tokens, caches, rows, scatter_in_place).hidden)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)


def big_target(layers: int) -> Target:
    """Llama-3-8B's shapes."""
    rope = RopeConfig(500000.0, 128)
    config = TargetConfig("llama", 128256, 4096, 14336, layers, 32, 8, 128, 1e-5, 8192, rope)
    weights: dict[str, Tensor] = {
        "model.embed_tokens.weight": half(128256, 4096),
        "model.norm.weight": half(4096),
        "lm_head.weight": half(128256, 4096),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (4096, 4096)),
            ("self_attn.k_proj", (1024, 4096)),
            ("self_attn.v_proj", (1024, 4096)),
            ("self_attn.o_proj", (4096, 4096)),
            ("mlp.gate_proj", (14336, 4096)),
            ("mlp.up_proj", (14336, 4096)),
            ("mlp.down_proj", (4096, 14336)),
        ):
            weights[f"{prefix}{name}.weight"] = half(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = half(4096)
    return Target(config, weights, 2048, attention="stacked").half()


def half(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float16) * 0.02


# --- whole bundles ----------------------------------------------------------------------------


def forerun(*arguments: str, device: bool = True) -> str:
    """One `forerun` command in a process of its own."""
    hidden = {} if device else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "from forerun.cli import main; main()", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | hidden)
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])
    return run.stdout


def speculation(folder: Path) -> Report:
    """The speculative loop under CUDA graphs: speedup, tau, host share, and a step's kernels."""
    found = bench(folder / "torch", "torch", "fp16")
    return found | {"kernels_a_step": kernels_a_step(folder / "torch")}


def kernels_a_step(bundle: Path, steps: int = 8) -> dict[str, float]:
    """Launches by the host, and kernels on the device, of a speculative step."""
    from forerun.runtime.bundle import load_bundle
    from forerun.runtime.engine import Request, load_engine

    engine = load_engine(load_bundle(bundle))
    nodes = int(load_bundle(bundle).manifest.default_tree)
    engine.prefill(Request([5] * 32, engine.context), nodes)
    for _ in range(4):  # both turns are captured
        engine.step(nodes)
    with torch.profiler.profile() as profile:
        for _ in range(steps):
            engine.step(nodes)
        torch.cuda.synchronize()
    events = profile.events()
    launches = sum("Launch" in event.name for event in events)
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    return {"launches": launches / steps, "kernels": kernels / steps}


def bench(bundle: Path, engine: str, precision: str) -> Report:
    """Compile SmolLM2 for `engine`, and bench it on ten prompts."""
    drafter = ("--drafter", "chat+ngram", "--engine", engine, "--precision", precision)
    device = ("--device", f"sm_{capability_here()}") if engine == "tensorrt-rtx" else ()
    forerun("compile", "smollm2", *drafter, *device, "-o", str(bundle))
    out = bundle.with_suffix(".json")
    limits = ("--limit", "10", "--max-new-tokens", "96", "--json", str(out))
    forerun("bench", str(bundle), "--prompts", str(PROMPTS), *limits)
    report: Report = json.loads(out.read_text())
    return report


def same_tokens(folder: Path) -> Report:
    """Greedy float32 tokens on the device against the CPU's, of the same bundle."""
    bundle, text = folder / "fp32", "Give three tips for a healthy breakfast."
    forerun(
        *("compile", "smollm2", "--drafter", "chat+ngram", "--engine", "torch"),
        *("--precision", "fp32", "-o", str(bundle)),
    )
    both = [forerun("generate", str(bundle), text, device=device) for device in (True, False)]
    if not all(both):
        raise RuntimeError("nothing was generated")
    return {"equal": both[0] == both[1], "device": both[0], "cpu": both[1]}


CHECKS: dict[str, Check] = {
    "interpreted_kernels": Check(interpreted_kernels, needs_device=False),
    "compiled_kernels": Check(compiled_kernels, needs_device=False),
    "kernels_on_device": Check(kernels_on_device, needs_device=True),
    "ptx_on_device": Check(ptx_on_device, needs_device=True),
    "verify_cost": Check(verify_cost, needs_device=True),
    "speculation": Check(speculation, needs_device=True),
    "same_tokens": Check(same_tokens, needs_device=True),
    "tensorrt_rtx": Check(
        lambda folder: bench(folder / "rtx", "tensorrt-rtx", "fp16"), needs_device=True
    ),
    "tensorrt": Check(lambda folder: bench(folder / "trt", "tensorrt", "fp16"), needs_device=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what this machine can run; 1 if any of it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--skip", nargs="*", default=[], choices=list(CHECKS))
    options = parser.parse_args(arguments)
    here = device_count() > 0 and torch.cuda.is_available()
    if not here:
        print("no CUDA device here that cuda-bindings and torch see: the other checks are run")
    report: Report = {"machine": examine(), "checks": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            if name in options.skip or (check.needs_device and not here):
                report["checks"][name] = {"skipped": "no CUDA device" if not here else "--skip"}
                continue
            begin = time.perf_counter()
            try:
                found = {"result": check.run(Path(folder))}
            except Exception as error:  # the next check must run whatever this one met
                found = {"error": f"{type(error).__name__}: {error}"}
            report["checks"][name] = found | {"seconds": round(time.perf_counter() - begin, 1)}
            print(
                f"{name}: {'failed: ' + found['error'] if 'error' in found else 'done'}", flush=True
            )
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("error" in found for found in report["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
