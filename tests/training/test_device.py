"""Training and synthesis on another device than the CPU, on a machine that has none.

The device is played: its tensors say that they are elsewhere (torch's `meta`), and hold their
values on the CPU. As on a GPU, an operation on tensors of both devices is an error; and where the
host has to wait for a value, that is counted. What comes out must be what the CPU gives, bit for
bit, but for rounding where torch has another kernel. Autocast, NCCL and a GPU's own kernels are
not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from forerun.cli import main  # noqa: E402
from forerun.errors import ForerunError  # noqa: E402
from forerun.models.drafter import NORMED  # noqa: E402
from forerun.runtime.prompts import Prompt  # noqa: E402
from forerun.training import fit  # noqa: E402
from forerun.training.device import CPU, find_device  # noqa: E402
from forerun.training.kinds import KINDS, simulate, train  # noqa: E402
from forerun.training.plan import SynthesizeConfig  # noqa: E402
from forerun.training.synthesize import synthesize  # noqa: E402

DEVICE = torch.device("meta")
TRANSFERS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
OPTIONS = {
    "epochs": 2,
    "unroll": 2,
    "draft_vocabulary": 64,
    "batch": 200,
    "heads": None,
    "average": 0.9,
    "save_every": 3,
    "dtype": "float32",
}


class Elsewhere(Tensor):
    """A tensor of the played device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(),
            dtype=inner.dtype, device=DEVICE,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        """What torch does for devices and refuses subclasses."""
        return self.to(CPU).tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Machine.current().run(func, args, kwargs or {})


class Machine(TorchDispatchMode):
    """The host and its played device while the context lasts; `waits` counts what the host waited
    for."""

    active: list[Machine] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    @staticmethod
    def current() -> Machine:
        return Machine.active[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        away = any(isinstance(tensor, Elsewhere) for tensor in tensors)
        here = [t for t in tensors if not isinstance(t, Elsewhere) and t.dim()]  # numbers may mix
        if away and here and func not in TRANSFERS:
            raise RuntimeError(f"{func}: tensors of two devices")
        result_away = away
        if kwargs.get("device") is not None:
            result_away = torch.device(kwargs["device"]) == DEVICE
            kwargs = {**kwargs, "device": CPU}
        picks = func.overloadpacket in INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.waits += away and (picks or func in WAITS or not result_away)
        known = {id(t.inner): t for t in tensors if isinstance(t, Elsewhere)}

        def bare(leaf: Any) -> Any:
            return leaf.inner if isinstance(leaf, Elsewhere) else leaf

        def wrapped(leaf: Any) -> Any:  # what was changed in place stays the tensor that it is
            if not isinstance(leaf, Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else Elsewhere(leaf)

        found = func(*tree_map(bare, args), **tree_map(bare, kwargs))
        return tree_map(wrapped, found) if result_away else found


@pytest.fixture
def machine() -> Iterator[Machine]:
    played = Machine()
    Machine.active.append(played)
    with played:
        yield played
    Machine.active.pop()


@pytest.fixture(scope="module")
def data(once: Any, deep_checkpoint: Any) -> Path:
    """48 answers, some of them to prompts that begin alike."""
    asked = [
        Prompt(None, f"{'as before, ' * (i % 2)}{i} IJKLM", f"chat/{i % 3}") for i in range(48)
    ]
    config = SynthesizeConfig(12, shard=16, batch=8, dtype="float32", threads=1)
    return once("device", lambda folder: synthesize(deep_checkpoint, asked, folder, config))


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_the_played_device_tells_where_tensors_meet(machine: Machine) -> None:
    there, here = torch.ones(2, 3).to(DEVICE), torch.ones(2, 3)
    assert ((there + 1).device, there.to(CPU).tolist()) == (DEVICE, here.tolist())
    waits = machine.waits
    for mixed in (
        lambda: there + here,
        lambda: there @ here.T,
        lambda: there[torch.tensor([0])],
        lambda: torch.cat([there, here]),
        lambda: there.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    ):
        with pytest.raises(RuntimeError, match="two devices"):
            mixed()
    assert machine.waits == waits
    _ = there[there > 0], float(there.sum())
    assert machine.waits == waits + 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_trained_elsewhere_is_the_cpus(
    deep_checkpoint: Any,
    data: Path,
    tmp_path: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """All of it, what is written and what is reported; and no step waits for a value."""
    lines: dict[str, list[str]] = {"cpu": [], "meta": []}
    step, waited = fit._step, []

    def counted(*arguments: Any) -> Any:
        before = machine.waits
        found = step(*arguments)
        waited.append(machine.waits - before)
        return found

    monkeypatch.setattr(fit, "_step", counted)
    for device in (CPU, DEVICE):
        name = device.type
        train(
            kind, deep_checkpoint, [data], tmp_path / name, OPTIONS, lines[name].append,
            device=device,
        )  # fmt: skip
    assert lines["cpu"] == lines["meta"]
    assert files(tmp_path / "cpu") == files(tmp_path / "meta")
    assert len(waited) >= 8
    assert not any(waited)


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter:UserWarning")
def test_a_run_that_was_killed_goes_on_elsewhere(
    deep_checkpoint: Any,
    data: Path,
    tmp_path: Path,
    machine: Machine,
    steps_taken: tuple[list[int], list[int]],
) -> None:
    """From the device to the CPU and back, with a running mean and a best epoch to keep."""
    calls, deadly = steps_taken
    options = {**OPTIONS, "epochs": 3, "patience": 2, "save_every": 1}

    def run(folder: str, device: Any) -> None:
        train(
            "eagle", deep_checkpoint, [data], tmp_path / folder, options, lambda line: None,
            device=device,
        )  # fmt: skip

    run("whole", CPU)
    steps = len(calls)
    deadly[:] = [steps + steps // 3, steps + 2 * steps // 3]
    for device in (DEVICE, CPU):
        with pytest.raises(KeyboardInterrupt):
            run("killed", device)
    run("killed", DEVICE)
    assert files(tmp_path / "whole") == files(tmp_path / "killed")
    assert len(calls) == 2 * steps + 2  # the killed steps alone were made again


def test_answers_and_features_made_elsewhere_are_the_cpus(
    deep_checkpoint: Any, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, with the likeliest tokens beside them; and played with a drafter."""
    # Tensors of inference mode can't be wrapped where rows are written into them.
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    asked = [Prompt(None, f"{'as before, ' * (i % 2)}{i} IJKLM", "chat") for i in range(40)]
    played: dict[str, list[str]] = {}
    for device in (CPU, DEVICE):
        folder, name = tmp_path / device.type, device.type
        config = SynthesizeConfig(
            9, temperatures=(0.0, 0.8), shard=32, batch=8, top_logprobs=3, dtype="float32",
            threads=1, device=name,
        )  # fmt: skip
        synthesize(deep_checkpoint, asked, folder, config, layers=(2, NORMED))
        played[name] = []
        simulate(
            deep_checkpoint, "ngram", [folder], played[name].append, everything=True, device=device
        )
    assert played["cpu"] == played["meta"]
    shards = sorted(path.relative_to(tmp_path / "cpu") for path in (tmp_path / "cpu").rglob("*.s*"))
    assert len(shards) == 6
    for shard in shards:
        here, there = (load_file(tmp_path / name / shard) for name in played)
        assert here.keys() == there.keys()
        for column, wanted in here.items():
            # Torch has an attention kernel for the CPU alone, which rounds otherwise.
            margin = 0.01 if wanted.is_floating_point() else 0
            torch.testing.assert_close(there[column], wanted, rtol=margin, atol=margin)


def test_answers_of_one_device_are_not_gone_on_with_on_another(
    deep_checkpoint: Any, tmp_path: Path
) -> None:
    """A folder that names no device was made on the CPU."""
    asked, config = [Prompt(None, "0 IJKLM", "chat")], SynthesizeConfig(4, dtype="float32")
    synthesize(deep_checkpoint, asked, tmp_path, config)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["device"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert synthesize(deep_checkpoint, asked, tmp_path, config) == 0
    with pytest.raises(ForerunError, match="made with device 'cpu', now 'cuda'"):
        synthesize(deep_checkpoint, asked, tmp_path, replace(config, device="cuda"))


def test_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (find_device("auto"), find_device("cpu")) == (CPU, CPU)
    with pytest.raises(ForerunError, match="torch finds no GPU here: choose --device cpu"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert find_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_device("cuda") == torch.device("cuda", 1)
    assert find_device("cpu") == CPU
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ForerunError, match=r"3 processes or more here, .* there are 2"):
        find_device("auto")


@pytest.mark.parametrize("words", [
    ("train", "eagle", "nowhere", "--data", "nowhere"),
    ("synthesize", "nowhere", "--prompts", "nowhere"),
])  # fmt: skip
def test_a_gpu_that_is_not_there_is_one_line(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, [*words, "-o", str(tmp_path / "out"), "--device", "cuda"])
    assert done.exit_code == 1
    assert "--device cuda: torch finds no GPU here" in done.output
    assert done.output.count("\n") == 1
    assert not (tmp_path / "out").exists()
