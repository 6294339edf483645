"""The step on a device, as far as that shows without one: on torch's "meta" device.

Its tensors refuse to be mixed with the CPU's, and have no content that a host could read. So a
step that passes computes on one device alone and holds no synchronisation, as a CUDA graph of it
must not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun.models.combined import Combined
from forerun.models.drafter import Drafter
from forerun.models.growing import as_growing
from forerun.models.ngram import NGram
from forerun.models.ops import scatter_in_place
from forerun.models.signature import signature
from forerun.models.step import INPUT_NAMES, Step, StepInputs
from forerun.models.target import Caches, Target

BATCH, NODES, SLOTS = 2, 4, 64
SIZES = {
    "batch": BATCH,
    "nodes": NODES,
    "verified": NODES,
    "next_nodes": NODES,
    "pending_in": 5,
    "slots": SLOTS,
    "uniform_positions": SLOTS,
}


@pytest.fixture
def drafters(
    make_medusa: Callable[..., Any],
    make_eagle: Callable[..., Any],
    make_draft_model: Callable[..., Any],
) -> dict[str, Callable[[Target], Drafter]]:
    return {
        "plain": lambda target: Drafter(),
        "ngram": lambda target: NGram(4, 3, 1),
        "medusa": make_medusa,
        "combined": lambda target: Combined(as_growing(make_medusa(target)), 4),
        "eagle": lambda target: make_eagle(target, "eagle"),
        "eagle3": make_eagle,
        "mtp": lambda target: make_eagle(target, "mtp", top_k=1, depth=4),
        "draft": lambda target: make_draft_model(1, 4, "matching"),
        "rejection": lambda target: make_draft_model(1, 4, "rejection"),
    }


def move(module: torch.nn.Module) -> None:
    """Put tensors of the device in the place of all weights."""
    for child in module.modules():
        for kept in (child._parameters, child._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    parameter = isinstance(tensor, torch.nn.Parameter)
                    kept[name] = torch.nn.Parameter(new, False) if parameter else new


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize(
    "name",
    ["plain", "ngram", "medusa", "combined", "eagle", "eagle3", "mtp", "draft", "rejection"],
)
def test_a_step_stays_on_its_device(
    make_target: Callable[..., Target],
    drafters: dict[str, Callable[[Target], Drafter]],
    name: str,
    works: bool,
    sampling: bool,
) -> None:
    target = make_target(0, "stacked")
    step = Step(target, drafters[name](target), 5).eval()
    step.sampling = sampling
    facts = signature(step, {"slots": SLOTS})
    nodes = NODES if step.drafter.candidates else 1
    sizes = SIZES | {"nodes": nodes, "verified": nodes, "next_nodes": nodes}
    with torch.no_grad():
        given = {
            key: torch.empty(
                [sizes[axis] if isinstance(axis, str) else axis for axis in axes],
                dtype=dtype,
                device="meta",
            )
            for key, (axes, dtype) in facts.inputs.items()
        }
        move(step)
        # The engine's flags lie on the host, which reads them.
        flags = {"drafting": torch.tensor(works), "remembering": torch.tensor(works)}
        inputs = StepInputs(**{key: given[key] for key in INPUT_NAMES} | flags)
        layers = range(target.config.num_layers)
        caches = Caches(*([given[f"{k}_{i}"] for i in layers] for k in ("keys", "values")))
        states = [given[spec.name] for spec in step.drafter.states()]
        outputs, _, after = step(inputs, caches, states, scatter_in_place)
    for key, tensor in outputs.named().items():
        assert tensor.device.type == "meta", key
    assert outputs.next_tokens.shape == (BATCH, nodes)
    for spec, tensor in zip(step.drafter.states(), after, strict=True):
        assert tensor.device.type == "meta" and tensor.shape == given[spec.name].shape


def test_what_the_host_would_have_to_read_is_found() -> None:
    """The tests above would show nothing otherwise."""
    rows, places = torch.empty(2, 3, device="meta"), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="meta"):
        rows[:, places.to("meta")[0]]
    with pytest.raises(RuntimeError, match="meta"):
        bool(rows.amax() > 0)
    with pytest.raises(RuntimeError, match="meta"):
        rows + torch.zeros(2, 3)
