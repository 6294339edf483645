"""Training on a task that can be learnt, resuming it, and the measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.medusa_folder import load_medusa  # noqa: E402
from forerun.runtime.tree import Tree, best_tree  # noqa: E402
from forerun.training import fit as module  # noqa: E402
from forerun.training.data import Answers, Data, commonest  # noqa: E402
from forerun.training.evaluate import accuracy, greedy_chain, in_vocabulary, tau  # noqa: E402
from forerun.training.fit import CHECKPOINT, Settings, schedule  # noqa: E402
from forerun.training.medusa import (  # noqa: E402
    MedusaTraining,
    VocabularyLoss,
    train_medusa,
    vocabulary_matrix,
)

TRAINING = MedusaTraining(heads=3, layers=2, batch=64, draft_vocabulary=40)
SETTINGS = Settings(epochs=30, rate=5e-3, save_every=7, dtype="float32")


def counting(checkpoint: Any, answers: int, seed: int, noise: float = 0.3) -> Answers:
    """Sequences that count upwards modulo 20 behind states that tell where they are."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    lengths = torch.randint(6, 14, (answers,), generator=draw)
    first = torch.randint(0, 20, (answers,), generator=draw)
    tokens = torch.cat([(a + torch.arange(n)) % 20 for a, n in zip(first, lengths, strict=True)])
    states = table[tokens] + noise * torch.randn(len(tokens), 32, generator=draw)
    kinds = tuple("chat" if i % 2 else "tool" for i in range(answers))
    return Answers(states.bfloat16(), tokens, lengths, kinds)


def counting_data(checkpoint: Any) -> Data:
    train = counting(checkpoint, 200, 1)
    frequencies = torch.bincount(train.tokens, minlength=260)
    return Data(train, counting(checkpoint, 40, 2), frequencies, checkpoint.digest)


def test_heads_learn(tiny_checkpoint: Any, tiny_target: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    config = train_medusa(
        tiny_checkpoint, counting_data(tiny_checkpoint), tmp_path, TRAINING, SETTINGS, lines.append
    )
    assert all(row[0] > 0.9 for row in config.accuracy), config.accuracy
    assert any("tau chain" in line for line in lines)
    assert not (tmp_path / CHECKPOINT).exists()
    # The shipped folder proposes what was measured.
    heads = load_medusa(tmp_path, vocabulary_matrix(tiny_checkpoint))
    held_out = counting_data(tiny_checkpoint).held_out
    features = heads.features(held_out.states.float())
    choices = heads.ids[heads.heads[0](features).argmax(-1)]
    hits = accuracy(choices[..., None], held_out.following(3))
    assert heads.config.accuracy == config.accuracy
    assert all(row[0] > 0.9 for row in hits)


def test_resume_equals_an_uninterrupted_run(
    tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, settings = counting_data(tiny_checkpoint), replace(SETTINGS, epochs=2)
    step, calls, deadly = module._step, [], 1000

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == deadly:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(module, "_step", counted)
    train_medusa(tiny_checkpoint, data, tmp_path / "whole", TRAINING, settings)
    steps, deadly = len(calls), len(calls) + 24
    with pytest.raises(KeyboardInterrupt):
        train_medusa(tiny_checkpoint, data, tmp_path / "killed", TRAINING, settings)
    train_medusa(tiny_checkpoint, data, tmp_path / "killed", TRAINING, settings)
    assert len(calls) == steps + 24 + steps - 21  # step 21 was the last one saved
    for name in ("config.json", "medusa.safetensors"):
        whole, killed = ((tmp_path / run / name).read_bytes() for run in ("whole", "killed"))
        assert whole == killed


def test_another_targets_data_are_refused(tiny_checkpoint: Any, tmp_path: Path) -> None:
    data = replace(counting_data(tiny_checkpoint), target_digest="e" * 64)
    with pytest.raises(ForerunError, match="not tiny's answers"):
        train_medusa(tiny_checkpoint, data, tmp_path, TRAINING, SETTINGS)


def test_following_ends_with_the_answer() -> None:
    answers = Answers(
        torch.zeros(5, 2), torch.tensor([5, 6, 7, 0, 9]), torch.tensor([3, 2]), ("chat", "chat")
    )
    assert answers.following(2).tolist() == [[6, 7], [7, -1], [-1, -1], [9, -1], [-1, -1]]
    assert answers.where([False, True]).tokens.tolist() == [0, 9]


def test_tau_by_hand() -> None:
    answers = Answers(
        torch.zeros(6, 2), torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([6]), ("chat",)
    )
    truth = answers.following(2)
    perfect = torch.stack([truth, torch.full_like(truth, 99)], dim=2)  # [N, heads, k]
    assert tau(perfect, answers, greedy_chain(2, 2)) == 5 / 2  # 3 tokens, then the 2 that are left
    wrong = torch.full_like(perfect, 99)
    assert tau(wrong, answers, greedy_chain(2, 2)) == 1
    second = perfect.flip(2)  # the right token is the second choice
    assert tau(second, answers, greedy_chain(2, 2)) == 1
    both = Tree((-1, 0, 0, 2), (0, 1, 2, 4))  # root -> first, second; second -> head 1's second
    assert tau(second, answers, both) == 5 / 2
    assert best_tree(accuracy(second, truth), 2).slots == (0, 2)


def test_accuracy_counts_known_positions_only() -> None:
    choices = torch.tensor([[[1, 2]], [[3, 4]], [[0, 5]]])
    assert accuracy(choices, torch.tensor([[2], [3], [-1]])) == [[0.5, 0.5]]


def test_vocabulary() -> None:
    ids = commonest(torch.tensor([3, 0, 9, 0, 3]), 4)
    assert ids.tolist() == [2, 0, 4, 1]
    following = torch.tensor([[2, 3], [1, -1]])
    assert in_vocabulary(following, ids, 5).tolist() == [[0, -1], [3, -1]]


def test_schedule_rises_and_falls() -> None:
    rates = [schedule(step / 100, 0.1) for step in range(100)]
    assert max(rates) == rates[10] == 1
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] > 0 and rates[-1] < 0.01


def test_gradient_is_cross_entropys() -> None:
    draw = torch.Generator().manual_seed(4)
    states, output = torch.randn(9, 8, generator=draw), torch.randn(12, 8, generator=draw)
    truth = torch.randint(0, 12, (9,), generator=draw)
    states.requires_grad_(True)
    found = VocabularyLoss.apply(states, output, truth)
    (slope,) = torch.autograd.grad(3 * found, states)
    expected = torch.nn.functional.cross_entropy(states @ output.T, truth)
    (expected_slope,) = torch.autograd.grad(3 * expected, states)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slope, expected_slope)


def test_a_head_without_a_token_to_learn_has_no_loss() -> None:
    x = torch.zeros(0, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    loss = VocabularyLoss.apply(x, torch.randn(6, 4), none)
    loss.backward()
    assert loss.item() == 0.0 and x.grad is not None and x.grad.shape == (0, 4)
