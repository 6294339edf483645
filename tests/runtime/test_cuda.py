"""Engines on device addresses, with CUDA's calls made late over the host's memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import ForerunError
from forerun.runtime.batch import Job, decode_batch
from forerun.runtime.buffers import Layout, result_size
from forerun.runtime.bundle import Bundle, load_bundle
from forerun.runtime.cuda import Cuda, CudaMemory, device_count
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.engine_pinned import PinnedEngine
from forerun.runtime.engine_step import Named
from forerun.runtime.loop import Block, decode
from forerun.runtime.pace import Patience, Planned
from forerun.runtime.plan import Choice, Plan
from forerun.runtime.sampling import SamplingParams

pytest.importorskip("onnxruntime")

from forerun.runtime.engine_ort import NUMPY_TYPES, open_session, session_options
from forerun.runtime.engine_ort_cuda import OrtCudaEngine

spec = importlib.util.spec_from_file_location("late", Path(__file__).with_name("late.py"))
assert spec is not None and spec.loader is not None
late = importlib.util.module_from_spec(spec)
spec.loader.exec_module(late)

LOOP = [*range(40, 50)] * 3
PROMPTS = [[3, 4, 5, 6, 3, 4, 0], [0], LOOP, [*range(40)], [7] * 16, [9] * 33]
PARAMS = [SamplingParams(), SamplingParams(1.1, top_k=30, top_p=0.9, seed=2)]


def test_buffers_are_written_copied_and_read_in_order() -> None:
    api = late.LateApi()
    memory = CudaMemory(16, Cuda(api))
    buffer = memory.zeros((3, 2, 4), np.float32)
    rows = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    memory.write(buffer[1:2], rows)
    rows[:] = -1  # taken over at the call
    memory.copy(buffer[2:3], buffer[1:2])
    assert api.queue  # nothing has waited
    expected = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(memory.read(buffer), [np.zeros((2, 4)), expected, expected])
    memory.clear(buffer[1:])
    assert memory.read(buffer.reshape(24)).sum() == 0
    assert memory.read(memory.load(np.array(True))).tolist() is True
    assert memory.zeros((1, 4, 0, 8), np.float16).address > 0  # an empty tensor has an address


def test_results_come_in_order_and_only_when_waited_for() -> None:
    api = late.LateApi()
    memory = CudaMemory(4, Cuda(api))
    buffer = memory.zeros([2], np.int64)
    tickets = []
    for number in range(3):
        memory.begin()
        memory.write(buffer, np.array([number, -number]))
        tickets.append(memory.send(buffer))
    assert api.waits == 0
    for number, ticket in enumerate(tickets):
        assert memory.receive(ticket).tolist() == [number, -number]
        assert memory.seconds == pytest.approx(0.002 * (number + 1))
    assert api.waits == 3
    old = memory.send(buffer)
    for _ in range(4):
        memory.send(buffer)
    with pytest.raises(AssertionError, match="its place had gone to another"):
        memory.receive(old)


def test_a_captured_launch_runs_when_it_is_replayed() -> None:
    api = late.LateApi()
    memory, done = CudaMemory(4, Cuda(api)), []
    graph = memory.capture(lambda: api.enqueue(lambda: done.append(1)))
    memory.synchronize()
    assert done == []
    memory.replay(graph)
    memory.replay(graph)
    assert done == []
    memory.synchronize()
    assert done == [1, 1]


def test_memory_is_given_back() -> None:
    api = late.LateApi()
    memory = CudaMemory(4, Cuda(api))
    part = memory.zeros([8], np.int64)[2:4]
    assert len(api.device) == 1  # the part keeps the whole
    assert part.nbytes == 16
    del part
    assert not api.device
    graph = memory.capture(lambda: None)
    assert api.pinned and api.kept == 10  # a stream, a graph, and two events a place of the ring
    del memory, graph
    assert not api.pinned and not api.kept


def test_each_failure_is_one_line() -> None:
    api = late.LateApi()
    memory = CudaMemory(4, Cuda(api))
    api.fails["cudaMalloc"] = 2
    with pytest.raises(ForerunError) as caught:
        memory.zeros([4], np.int64)
    assert str(caught.value) == (
        "CUDA: cudaMalloc: cudaErrorMemoryAllocation: out of memory: take fewer rows, or compile "
        "with a smaller --capacity"
    )
    api.fails["cudaGetDeviceCount"] = 100
    with pytest.raises(ForerunError, match=r"no CUDA-capable device is detected: .*forerun doctor"):
        CudaMemory(4, Cuda(api))
    assert device_count(api) == 0 and device_count(late.LateApi(2)) == 2
    with pytest.raises(ForerunError, match="CUDA: no device: see `forerun doctor`"):
        CudaMemory(4, Cuda(late.LateApi(0)))


class LateOrt(OrtCudaEngine):
    """ONNX Runtime on the CPU, over addresses, run when somebody waits."""

    place = "cpu"

    def _memory(self, longest: int) -> CudaMemory:
        self.api = late.LateApi()
        return CudaMemory(longest, Cuda(self.api))

    def _open(self, bundle: Bundle, threads: int | None) -> tuple[Any, bool]:
        return open_session(bundle, session_options(threads)), False

    def _launch(self, bound: Any) -> None:
        """What lies in the host's memory is read now, as the provider reads it."""
        launch, inputs = super()._launch, bound[2]
        switches = {name: inputs[name] for name in ("remembering", "drafting") if name in inputs}
        seen = {name: switch.copy() for name, switch in switches.items()}

        def turn(values: dict[str, Any]) -> None:
            for name, value in values.items():
                switches[name][...] = value

        def work() -> None:
            since = {name: switch.copy() for name, switch in switches.items()}
            turn(seen)
            launch(bound)
            turn(since)

        self.api.enqueue(work)


class PinnedOrt(PinnedEngine):
    """The same, where only the shapes are taken that a TensorRT engine is built for."""

    ahead = 1

    def __init__(self, bundle: Bundle, rows: int = 1) -> None:
        self.api = late.LateApi()
        _, longest = result_size(rows, bundle.manifest.pending)
        self.session = open_session(bundle, session_options(1))
        inputs = {v.name: (v.shape, NUMPY_TYPES[v.type]) for v in self.session.get_inputs()}
        self.bound = 0
        super().__init__(Layout(bundle.manifest, inputs), CudaMemory(longest, Cuda(self.api)), rows)

    def _bind(self, inputs: Named, outputs: Named, nodes: int, again: bool) -> Any:
        self.bound += 1
        batch, count = inputs["tokens"].shape
        pending, verified = inputs["pending"].shape[2], inputs["verify"].shape[0]
        drafted = inputs["slots"].shape[0]
        if pending:
            assert (batch, count, verified, drafted) == (self.rows, nodes, nodes, nodes)
        else:
            default = int(self.manifest.default_tree)
            assert (batch, count, verified, drafted) == (1, self.manifest.chunk, 1, default)
        binding = self.session.io_binding()
        for name, buffer in inputs.items():
            binding.bind_input(name, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.address)
        for name, buffer in outputs.items():
            binding.bind_output(name, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.address)
        return binding, inputs, outputs

    def _launch(self, bound: Any) -> None:
        self.api.enqueue(lambda: self.session.run_with_iobinding(bound[0]))


KINDS = ["late", "pinned"]


def make(kind: str, bundle: Bundle, rows: int = 1) -> Any:
    return LateOrt(bundle, 1, rows) if kind == "late" else PinnedOrt(bundle, rows)


@pytest.fixture(scope="module", params=["tiny_bundle", "tiny_combined_bundle"])
def bundle(request: pytest.FixtureRequest) -> Bundle:
    return load_bundle(request.getfixturevalue(request.param))


def run(
    engine: Any, prompt: list[int], nodes: int, params: SamplingParams, new: int = 40
) -> tuple[list[int], str | None, Any]:
    decoding = decode(engine, Request(prompt, len(prompt) + new, params), nodes, (257,))
    blocks = list(decoding)
    tokens = [token for block in blocks for token in block.tokens]
    return tokens, blocks[-1].finish, decoding.stats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu_engine(
    bundle: Bundle, kind: str, params: SamplingParams
) -> None:
    reference, engine = load_engine(bundle, threads=1), make(kind, bundle)
    for nodes in sorted(map(int, bundle.manifest.trees)):
        for prompt in PROMPTS:
            found = run(engine, prompt, nodes, params)
            assert found[:2] == run(reference, prompt, nodes, params)[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_bound_once_and_read_once(bundle: Bundle, kind: str) -> None:
    engine, nodes = make(kind, bundle), int(bundle.manifest.default_tree)
    run(engine, LOOP, nodes, PARAMS[0])
    waits, kept = engine.api.waits, dict(engine.bindings)
    stats = run(engine, LOOP, nodes, PARAMS[0])[2]
    assert engine.bindings == kept and len(kept) == 2  # one a turn
    assert engine.api.waits - waits == stats.steps + 1  # and the prefill
    assert stats.engine_seconds == pytest.approx(0.002 * stats.steps)
    if kind == "pinned":
        assert engine.bound == 4  # and one a turn of the prefill


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_trees_of_changing_size(bundle: Bundle, kind: str, params: SamplingParams) -> None:
    """By context and, since these trees never pay, with plain steps in between."""
    reference, engine = load_engine(bundle, threads=1), make(kind, bundle)
    small, large = sorted(map(int, bundle.manifest.trees))[1:]
    sizes = ((1, large), (30, small), (50, 1), (60, large))
    choices = tuple(Choice(1, context, nodes, 2.0, 9.0) for context, nodes in sizes)
    plan = Plan("a machine", None, 1, 1, choices)
    pace = Planned(plan, Patience(window=3, rest=2, longest_rest=4, trial=1))
    for prompt in PROMPTS[:3]:
        request = Request(prompt, len(prompt) + 60, params)
        expected = [t for block in decode(reference, request, 1) for t in block.tokens]
        assert [t for block in decode(engine, request, pace) for t in block.tokens] == expected
    assert pace.switches > 0


@pytest.mark.parametrize("kind", KINDS)
def test_rows_side_by_side(bundle: Bundle, kind: str) -> None:
    reference, engine = load_engine(bundle, threads=1), make(kind, bundle, rows=3)
    nodes = int(bundle.manifest.default_tree)
    work = [
        Job(Request(prompt, len(prompt) + new, PARAMS[i % 2]))
        for i, (prompt, new) in enumerate(zip(PROMPTS, (40, 3, 30, 1, 25, 12), strict=True))
    ]
    found: dict[int, list[int]] = {number: [] for number in range(len(work))}
    for event in decode_batch(engine, work, nodes):
        assert isinstance(event.outcome, Block)
        found[event.number] += event.outcome.tokens
    for number, job in enumerate(work):
        blocks = decode(reference, job.request, nodes)
        assert found[number] == [token for block in blocks for token in block.tokens]


@pytest.mark.parametrize("kind", KINDS)
def test_the_context_ends_an_answer(bundle: Bundle, kind: str) -> None:
    reference, engine = load_engine(bundle, threads=1), make(kind, bundle)
    nodes = int(bundle.manifest.default_tree)
    prompt = [5] * (engine.context - 20)
    found = run(engine, prompt, nodes, PARAMS[0], new=1000)
    assert found[:2] == run(reference, prompt, nodes, PARAMS[0], new=1000)[:2]
    assert run(engine, [5] * engine.context, nodes, PARAMS[0])[:2] == ([], "length")
    with pytest.raises(ForerunError, match=f"this bundle takes 1 to {engine.context}"):
        run(engine, [5] * (engine.context + 1), nodes, PARAMS[0])


@pytest.mark.parametrize("kind", KINDS)
def test_scores(bundle: Bundle, kind: str) -> None:
    reference, engine = load_engine(bundle, threads=1), make(kind, bundle)
    tokens = (PROMPTS[3] * 2)[:50]
    wanted = reference.score(tokens)
    for chunk in (None, 1, 7):
        np.testing.assert_allclose(engine.score(tokens, chunk), wanted, atol=1e-4)


def test_a_step_that_fails_is_one_line(tiny_bundle: Path) -> None:
    engine = make("late", load_bundle(tiny_bundle))
    run(engine, LOOP, 1, PARAMS[0])
    # Not the one that was bound.
    engine.session = open_session(
        load_bundle(tiny_bundle), session_options(1)
    )  # not the one that was bound
    binding = engine.session.io_binding()  # with no inputs at all
    with pytest.raises(ForerunError, match=r"could not run it: .*smaller --capacity") as caught:
        OrtCudaEngine._launch(engine, (binding, None))
    assert "\n" not in str(caught.value)


def test_costs_of_a_pinned_engine_are_those_of_its_own_steps(bundle: Bundle) -> None:
    assert make("pinned", bundle).launch_ms(4 if "4" in bundle.manifest.trees else 6, 1, 3) == 2.0


def test_an_engine_for_a_gpu_says_what_is_missing(tmp_path: Path, tiny_bundle: Path) -> None:
    """Here CUDA's driver, or TensorRT itself, is not there: one line in each case."""
    from dataclasses import replace

    if device_count():
        pytest.skip("there is a GPU")
    bundle = load_bundle(tiny_bundle)
    for kind, line in (
        ("tensorrt", "needs the package 'tensorrt'|CUDA: "),
        ("tensorrt-rtx", "needs the package 'tensorrt-rtx'|CUDA: "),
    ):
        facts = replace(bundle.manifest.engine, kind=kind)
        with pytest.raises(ForerunError, match=line) as caught:
            load_engine(replace(bundle, manifest=replace(bundle.manifest, engine=facts)))
        assert "\n" not in str(caught.value)
