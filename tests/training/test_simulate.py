"""Played steps are those that the real step takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.compiler.eager import EagerStep  # noqa: E402
from forerun.models.combined import Combined  # noqa: E402
from forerun.models.draft_model import DraftModel  # noqa: E402
from forerun.models.drafter import NORMED, Drafter  # noqa: E402
from forerun.models.drafters import vocabulary_matrix  # noqa: E402
from forerun.models.growing import as_growing  # noqa: E402
from forerun.models.linear import Linear  # noqa: E402
from forerun.models.medusa import Medusa, MedusaConfig  # noqa: E402
from forerun.models.ngram import NGram  # noqa: E402
from forerun.models.step import Step  # noqa: E402
from forerun.models.target import Target  # noqa: E402
from forerun.runtime.replay import NOTHING, Played  # noqa: E402
from forerun.training.eagle import EagleTraining, start  # noqa: E402
from forerun.training.simulate import play  # noqa: E402
from forerun.training.texts import Text, features_of  # noqa: E402
from forerun.training.unrolled import Columns  # noqa: E402

SLOTS, NODES, ANSWER = 128, 5, 30
PROMPTS = [[40 + (i + j) % 10 for j in range(4 + i)] for i in range(4)] + [[3, 200, 7], [9] * 6]


def draft_model(checkpoint: Any) -> Drafter:
    """The target with blurred weights: right now and then."""
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: weight + torch.randn(weight.shape, generator=draw) * 0.03
        for name, weight in checkpoint.weights.items()
    }
    return DraftModel(checkpoint.config, weights, SLOTS, NODES - 1)


def from_the_target(kind: str) -> Callable[[Any], Drafter]:
    """A layer that mostly passes on the embedding, from which the tiny target's loop follows."""

    def make(checkpoint: Any) -> Drafter:
        training = EagleTraining(kind=kind, draft_vocabulary=260)
        drafter, _ = start(checkpoint, training, torch.arange(260), SLOTS)
        drafter.trim([NODES])
        passed = torch.cat([torch.eye(32), torch.zeros(32, 32)])
        with torch.no_grad():
            assert drafter.fc is not None
            drafter.fc.get_parameter("weight").copy_(
                passed if kind == "eagle" else passed.roll(32, 0)
            )
            for module in (drafter.attention.output, drafter.mlp.down):
                module.get_parameter("weight").mul_(0.2)
        return drafter.eval()

    return make


def heads_of_the_target(checkpoint: Any) -> Drafter:
    """Heads that mostly pass on the state, so that some of their ten choices come true."""
    draw = torch.Generator().manual_seed(5)
    vocabulary = vocabulary_matrix(checkpoint).T
    blocks = [
        [Linear(torch.randn(32, 32, generator=draw) * 0.1, torch.zeros(32))] for _ in range(3)
    ]
    accuracy = tuple(tuple(0.4 / (head + k + 1) for k in range(10)) for head in range(3))
    drafter = Medusa(MedusaConfig(3, 1, 32, 10, accuracy), blocks, [Linear(vocabulary)])
    return drafter.eval()


KINDS: dict[str, Callable[[Any], Drafter]] = {
    "medusa": heads_of_the_target,
    "medusa+ngram": lambda checkpoint: Combined(
        as_growing(heads_of_the_target(checkpoint)), NODES - 1
    ),
    "ngram": lambda _: NGram(NODES - 1, 4, 1),
    "draft": draft_model,
    "eagle": from_the_target("eagle"),
    "mtp": from_the_target("mtp"),
    "mtp+ngram": lambda checkpoint: Combined(
        as_growing(from_the_target("mtp")(checkpoint)), NODES - 1
    ),
}


def decode(step: Step, prompt: list[int], new: int) -> tuple[list[int], list[int]]:
    """Tokens and how many each step committed, by the eager step."""
    eager = EagerStep(step, SLOTS, limit=len(prompt) + new)
    inputs = eager.prefill_inputs(prompt, [len(prompt) - 1], NODES)
    outputs, *_ = eager.run(inputs)
    tokens, counts = [int(outputs.emitted[0, 0])], []
    while len(tokens) < new:
        inputs = eager.step_inputs(inputs, outputs)
        outputs, *_ = eager.run(inputs)
        counts.append(int(outputs.count[0]))
        tokens += outputs.emitted[0, : counts[-1]].tolist()
    return tokens, counts


@pytest.mark.parametrize("kind", KINDS)
def test_tau_is_what_the_step_commits(tiny_checkpoint: Any, kind: str) -> None:
    drafter = KINDS[kind](tiny_checkpoint)
    config, weights = tiny_checkpoint.config, tiny_checkpoint.weights
    target = Target(config, weights, SLOTS).eval()
    texts, expected = [], NOTHING
    for number, prompt in enumerate(PROMPTS):
        new = ANSWER - 3 * number
        tokens, counts = decode(Step(target, drafter).eval(), prompt, new)
        expected += Played(len(counts), sum(counts), ())
        whole = torch.tensor(prompt + tokens)
        reader = Target(config, weights, SLOTS, "torch").eval()
        both = features_of(reader, [whole], [*drafter.feature_layers, NORMED])[0]
        states, features = both[len(prompt) - 1 : -1, -32:], both[:, :-32]
        texts.append(Text(whole, len(prompt), features, states, "", True, True))
    ends = Columns.of(tiny_checkpoint)
    found = play(drafter, ends, texts, NODES)
    assert (found.steps, found.committed) == (expected.steps, expected.committed)
    assert found.tau > 1.05  # something was accepted, so that the states were put to the test
    assert found.reached[0] >= found.reached[-1]


def test_a_drafter_is_played_by_a_command_that_imports_no_more_than_it_needs(
    chat_folder: Path, tmp_path: Path
) -> None:
    """In a process of its own, for what other tests import may hide what is missing."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(40)))
    data, target = tmp_path / "data", str(chat_folder)
    small = ("--max-new-tokens", "12", "--dtype", "float32")
    sizes = ("--epochs", "1", "--depth", "1", "--block", "4", "--feature-layer", "1")
    asked = ("synthesize", target, "--prompts", str(prompts), "-o", str(data), *small)
    taught = ("train", "dflash", target, "--data", str(data), "-o", str(tmp_path / "d"), *sizes)
    played = ("simulate", target, "--drafter", str(tmp_path / "d"), "--data", str(data), "--all")
    for words in (asked, taught, played):
        forerun = Path(sys.executable).with_name("forerun")
        done = subprocess.run([str(forerun), *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("answers, 4 nodes: tau ")
