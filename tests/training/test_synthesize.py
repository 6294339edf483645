"""Answers against plain loops and transformers; shards that depend on themselves alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.checkpoint import Checkpoint, load_checkpoint  # noqa: E402
from forerun.models.drafter import NORMED  # noqa: E402
from forerun.runtime.prompts import Prompt  # noqa: E402
from forerun.training import synthesize as module  # noqa: E402
from forerun.training.data import data_of  # noqa: E402
from forerun.training.filters import Excluded, is_held_out  # noqa: E402
from forerun.training.plan import SynthesizeConfig  # noqa: E402
from forerun.training.synthesize import synthesize  # noqa: E402
from forerun.training.texts import read_texts  # noqa: E402

CONFIG = SynthesizeConfig(
    12, temperatures=(0.8,), greedy_share=0.5, shard=4, batch=3, dtype="float32"
)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(None, f"{'word ' * (i % 4)}number {i}", f"chat/{i % 2}") for i in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a data folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def texts_of(folder: Path) -> list[dict[str, Any]]:
    """Every text of a data folder: its place, tokens and what was kept of its answer."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        shard = load_file(path)
        ends = shard["lengths"].cumsum(0).tolist()
        answer = 0
        for row, end in enumerate(ends):
            length, prompt = int(shard["lengths"][row]), int(shard["prompt_lengths"][row])
            tokens = shard["tokens"][end - length : end].tolist()
            columns = ("indices", "samples", "turns", "temperatures", "held_out")
            kept = {name: shard[name][row].item() for name in columns}
            places = slice(answer, answer + length - prompt)
            kept |= {
                name: shard[name][places]
                for name in ("states", "top_ids", "top_logprobs")
                if name in shard
            }
            found.append(kept | {"prompt": tokens[:prompt], "answer": tokens[prompt:]})
            answer += length - prompt
        assert answer == len(shard["states"])
    return found


@pytest.fixture(scope="module")
def chat(chat_folder: Path) -> SimpleNamespace:
    """The tiny chat target: its checkpoint, and what transformers makes of it."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    return SimpleNamespace(
        checkpoint=load_checkpoint(chat_folder),
        model=AutoModelForCausalLM.from_pretrained(chat_folder, dtype=torch.float32).eval(),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(chat_folder),
    )


def greedy(model: Any, prompt: list[int], stops: tuple[int, ...], limit: int) -> list[int]:
    """A plain loop with transformers, without a cache."""
    tokens: list[int] = []
    while len(tokens) < limit and (not tokens or tokens[-1] not in stops):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("killed_at", [1, 2, 5])
def test_resume_equals_an_uninterrupted_run(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    asked, layers = prompts(23), (1, NORMED)
    synthesize(tiny_checkpoint, asked, tmp_path / "whole", CONFIG, layers=layers)
    write, calls = module.write_shard, []

    def dying(path: Path, texts: Any) -> None:
        calls.append(path)
        if len(calls) == killed_at:
            path.with_name(f"{path.name}.7.part").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        write(path, texts)

    monkeypatch.setattr(module, "write_shard", dying)
    killed = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        synthesize(tiny_checkpoint, asked, killed, CONFIG, layers=layers)
    assert len([*killed.glob("*.safetensors")]) == killed_at - 1
    monkeypatch.setattr(module, "write_shard", write)
    (killed / "mine.part").touch()
    assert synthesize(tiny_checkpoint, asked, killed, CONFIG, layers=layers) > 0
    (killed / "mine.part").unlink()  # nobody else's files are touched
    assert contents(killed) == contents(tmp_path / "whole")
    assert synthesize(tiny_checkpoint, asked, killed, CONFIG, layers=layers) == 0


def test_features_may_be_asked_for_later(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    asked, layers = prompts(9), (0, 2)
    synthesize(tiny_checkpoint, asked, tmp_path / "at once", CONFIG, layers=layers)
    assert synthesize(tiny_checkpoint, asked, tmp_path / "later", CONFIG) > 0
    assert synthesize(tiny_checkpoint, asked, tmp_path / "later", CONFIG, layers=layers) == 0
    found = contents(tmp_path / "later")
    assert "features-0-2/00002.safetensors" in found
    assert found == contents(tmp_path / "at once")


def test_every_prompt_once_with_its_stop_token(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    synthesize(tiny_checkpoint, prompts(23), tmp_path, CONFIG)
    texts = texts_of(tmp_path)
    assert [text["indices"] for text in texts] == [*range(23)]
    for text, prompt in zip(texts, prompts(23), strict=True):
        assert tiny_checkpoint.tokenizer.decode(text["prompt"]) == prompt.text
        ended = [token in tiny_checkpoint.stop_ids for token in text["answer"]]
        assert not any(ended[:-1])
        assert ended[-1] or len(ended) == 12


def test_an_answer_depends_on_its_prompt_and_sample_alone(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Not on the file, the company or the batch; samples differ from one another."""
    config = replace(CONFIG, temperatures=(0.0, 0.7, 1.5), samples=3, greedy_share=0.0)

    def answered(asked: list[Prompt], name: str, **changes: Any) -> dict[Any, list[int]]:
        synthesize(tiny_checkpoint, asked, tmp_path / name, replace(config, **changes))
        return {
            (tuple(t["prompt"]), round(t["temperatures"], 3), t["samples"]): t["answer"]
            for t in texts_of(tmp_path / name)
        }

    whole = answered(prompts(7), "whole")
    assert len(whole) == 7 * (1 + 3 + 3)
    assert answered(prompts(7)[:2:-1], "part", batch=5, shard=9).items() <= whole.items()
    sampled = {key: answer for key, answer in whole.items() if key[1]}
    assert len({tuple(answer) for answer in sampled.values()}) > 0.9 * len(sampled)
    other = answered(prompts(7), "seed", seed=1)
    assert all(other[key] == whole[key] for key in whole if not key[1])
    assert sum(other[key] == whole[key] for key in sampled) < 0.1 * len(sampled)


def test_samples_follow_the_targets_distribution(chat: SimpleNamespace, tmp_path: Path) -> None:
    """Chi-square of first tokens against transformers' probabilities."""
    from scipy.stats import chisquare

    config = SynthesizeConfig(
        1, temperatures=(0.7,), samples=3000, shard=3000, batch=500, dtype="float32"
    )
    synthesize(chat.checkpoint, [Prompt(None, "Say one letter", None)], tmp_path, config)
    texts = texts_of(tmp_path)
    with torch.inference_mode():
        logits = chat.model(torch.tensor([texts[0]["prompt"]])).logits[0, -1]
    expected = 3000 * (logits.to(torch.float64) / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([t["answer"][0] for t in texts]), minlength=260)
    often = expected > 8
    found = [*counts[often].tolist(), int(counts[~often].sum())]
    wanted = [*expected[often].tolist(), float(expected[~often].sum())]
    assert len(wanted) > 5
    assert chisquare(found, wanted).pvalue > 1e-3


def test_conversations_are_answered_turn_by_turn(chat: SimpleNamespace, tmp_path: Path) -> None:
    """Against transformers' template, tokenizer and a plain loop, whatever the batch."""
    later = ("And?", "Why?")
    asked = [
        Prompt(({"role": "user", "content": f"Begin {i}"},), None, "talk", later[: i % 3])
        for i in range(8)
    ]
    config = replace(CONFIG, temperatures=(0.0,), shard=5, max_prompt_tokens=150)
    lines: list[str] = []
    synthesize(chat.checkpoint, asked, tmp_path, config, say=lines.append)
    texts, stops = iter(texts_of(tmp_path)), chat.checkpoint.stop_ids
    lengths = set()
    for index, prompt in enumerate(asked):
        messages = [*(prompt.messages or ())]
        for turn, question in enumerate((*prompt.later, None)):
            text = next(texts)
            assert (text["indices"], text["turns"]) == (index, turn)
            ids = chat.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            assert text["prompt"] == ids
            assert text["answer"] == greedy(chat.model, ids, stops, 12)
            assert text["held_out"] == is_held_out(prompt)
            said = [token for token in text["answer"] if token not in stops]
            said = chat.tokenizer.decode(said, skip_special_tokens=True)
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": question},
            ]
            lengths.add(len(text["answer"]))
    assert next(texts, None) is None and len(lengths) > 2


def test_a_conversation_ends_where_it_grows_too_long(chat: SimpleNamespace, tmp_path: Path) -> None:
    asked = [Prompt(({"role": "user", "content": "Hi"},), None, None, ("Go on.",) * 9)]
    config = replace(CONFIG, max_prompt_tokens=90)
    synthesize(chat.checkpoint, asked, tmp_path, config)
    texts = texts_of(tmp_path)
    assert 1 < len(texts) < 10
    assert all(len(text["prompt"]) <= 90 for text in texts)


def test_tools_reach_the_template(chat: SimpleNamespace, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "pay", "parameters": {}}}
    asked = [Prompt(({"role": "user", "content": "Pay"},), None, None, (), (tool,))]
    synthesize(chat.checkpoint, asked, tmp_path, CONFIG)
    shown = chat.tokenizer.decode(texts_of(tmp_path)[0]["prompt"])
    assert shown == "[pay](user) Pay\n(assistant) "


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_top_logprobs_and_features_are_transformers(
    chat: SimpleNamespace, tmp_path: Path, dtype: str
) -> None:
    config = replace(CONFIG, top_logprobs=5, dtype=dtype)
    layers = (0, 1, NORMED)
    synthesize(chat.checkpoint, prompts(9), tmp_path, config, layers=layers)
    exact = dtype == "float32"
    features = read_texts(chat.checkpoint, [tmp_path], layers)
    for text, kept in zip(texts_of(tmp_path), features, strict=True):
        tokens = torch.tensor([text["prompt"] + text["answer"]])
        with torch.inference_mode():
            seen = chat.model(tokens, output_hidden_states=True)
        answer = slice(len(text["prompt"]) - 1, -1)
        logprobs = seen.logits[0, answer].to(torch.float32).log_softmax(-1)
        best = logprobs.topk(5, dim=-1)
        values = text["top_logprobs"].to(torch.float32)
        assert text["top_ids"].dtype == torch.int32 and text["top_logprobs"].dtype == torch.float16
        assert (values.diff(dim=-1) <= 0).all() and (values <= 0).all()
        if exact:
            assert torch.equal(text["top_ids"].long(), best.indices)
        own = logprobs.gather(1, text["top_ids"].long())
        torch.testing.assert_close(values, own, atol=1e-3 if exact else 0.4, rtol=1e-3)
        states = seen.hidden_states
        expected = torch.cat([states[0][0], states[1][0], states[-1][0]], dim=-1)
        error = (kept.features.float() - expected).norm() / expected.norm()
        assert error < (0.004 if exact else 0.03)  # features are kept in bfloat16


def test_low_precision_logprobs_come_from_float32_scores() -> None:
    """A hundred times nearer to the truth than bfloat16 logits are."""
    from forerun.training.generate import likeliest

    draw = torch.Generator().manual_seed(5)
    head = torch.nn.Linear(64, 500, bias=False).requires_grad_(False)
    head.weight.normal_(generator=draw)
    head.to(torch.bfloat16)
    tied = type("Tied", (torch.nn.Module,), {})()
    tied.embed = head
    hidden = torch.randn(40, 64, generator=draw).to(torch.bfloat16)
    exact = (hidden.to(torch.float64) @ head.weight.to(torch.float64).T).log_softmax(-1)
    logits = head(hidden)
    top = likeliest(tied, hidden, logits, 6)
    best = exact.topk(6, dim=-1)
    assert torch.equal(top.ids.long(), best.indices)
    error = (top.logprobs.double() - best.values).abs().max()
    rough = (logits.double().log_softmax(-1).gather(1, best.indices) - best.values).abs().max()
    assert error < 0.01 and rough > 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "made with seed 0, now 1"),
        ({"batch": 4}, "made with batch 3, now 4"),
        ({"temperatures": (0.8, 1.0)}, r"made with temperatures \[0.8\], now \[0.8, 1.0\]"),
        ({"top_logprobs": 2}, "made with top_logprobs 0, now 2"),
        ({"threads": 77}, r"made with threads \d+, now 77"),
    ],
)
def test_another_configuration_is_refused(
    tiny_checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    synthesize(tiny_checkpoint, prompts(5), tmp_path, CONFIG)
    before = contents(tmp_path)
    with pytest.raises(ForerunError, match=message) as caught:
        synthesize(tiny_checkpoint, prompts(5), tmp_path, replace(CONFIG, **change))
    assert "\n" not in str(caught.value)
    with pytest.raises(ForerunError, match="made with prompts 5, now 6"):
        synthesize(tiny_checkpoint, prompts(6), tmp_path, CONFIG)
    with pytest.raises(ForerunError, match="made with target_digest"):
        synthesize(replace(tiny_checkpoint, digest="e" * 64), prompts(5), tmp_path, CONFIG)
    assert contents(tmp_path) == before


def test_what_is_dropped_is_counted(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    lines: list[str] = []
    asked = [*prompts(9), *prompts(2), Prompt(None, "NUMBER\n0", None)]
    excluded = Excluded.of([Prompt(None, "Number: 4!", None)])
    config = replace(CONFIG, max_prompt_tokens=18)
    synthesize(tiny_checkpoint, asked, tmp_path, config, excluded, say=lines.append)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["dropped"] == {"duplicate": 3, "same_question": 1, "too_long": 2}
    assert manifest["prompts"] == 6
    assert "dropped: 3 duplicate, 2 too_long, 1 same_question" in lines[0]
    assert [text["indices"] for text in texts_of(tmp_path)] == [0, 1, 2, 5, 6, 8]
    none = replace(CONFIG, max_prompt_tokens=2)
    with pytest.raises(ForerunError, match=r"no prompt is left to answer .* more than 2 tokens"):
        synthesize(tiny_checkpoint, prompts(3), tmp_path / "b", none)
    long = Prompt(None, "x" * 250, None)  # the context is 256 tokens
    with pytest.raises(ForerunError, match="more than 244 tokens"):
        synthesize(tiny_checkpoint, [long], tmp_path / "b", CONFIG)
    with pytest.raises(ForerunError, match="leaves no room for a prompt"):
        synthesize(tiny_checkpoint, prompts(3), tmp_path / "b", replace(CONFIG, max_new_tokens=256))
    assert not (tmp_path / "b").exists()


def test_sizes_are_stated_before_anything_is_written(
    chat: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Prompt(({"role": "user", "content": f"{i}"},), None, "a", ("b",)) for i in range(40)]
    config = replace(CONFIG, temperatures=(0.9,), samples=2, top_logprobs=3, shard=20)
    stated: list[int] = []
    disk = shutil.disk_usage(tmp_path)

    def check(folder: Path, parts: dict[str, int], say: Any) -> None:
        assert not folder.exists()
        stated.append(sum(parts.values()))

    with monkeypatch.context() as patch:
        patch.setattr(module, "_check_space", check)
        synthesize(chat.checkpoint, asked, tmp_path / "a", config, layers=(1, 2))
    written = sum(map(len, contents(tmp_path / "a").values()))
    assert written <= stated[0] < 12 * written  # the second turn's prompts may be 640 tokens long
    lines: list[str] = []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: disk._replace(free=stated[0] - 1))
    with pytest.raises(ForerunError, match=r"to write, but .* are free") as caught:
        synthesize(chat.checkpoint, asked, tmp_path / "b", config, layers=(1, 2), say=lines.append)
    assert "\n" not in str(caught.value) and not (tmp_path / "b").exists()
    for part in ("tokens", "states", "features", "top log-probabilities"):
        assert part in lines[-1]
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: disk._replace(free=stated[0]))
    synthesize(chat.checkpoint, asked, tmp_path / "b", config, layers=(1, 2))
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_split_is_deterministic_and_disjoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    asked = prompts(80)
    held = [is_held_out(prompt) for prompt in asked]
    assert 0 < sum(held) < 20
    config = replace(CONFIG, temperatures=(0.0, 1.0), samples=2, greedy_share=0.0, shard=7)
    synthesize(tiny_checkpoint, asked, tmp_path, config)
    for text in texts_of(tmp_path):
        assert text["held_out"] == held[text["indices"]]
    data = data_of(read_texts(tiny_checkpoint, [tmp_path], ()), tiny_checkpoint)
    assert len(data.held_out.lengths) == sum(held)  # those at temperature 0
    assert len(data.train.lengths) == 3 * (80 - sum(held))
    assert set(data.train.kinds) == {"chat"}
    assert len(data.train.states) == len(data.train.tokens) == int(data.train.lengths.sum())


def test_shards_of_earlier_versions_are_read(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    synthesize(tiny_checkpoint, prompts(9), tmp_path, CONFIG)
    expected = data_of(read_texts(tiny_checkpoint, [tmp_path], ()), tiny_checkpoint)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        del tensors["samples"], tensors["turns"]
        kinds = [f"chat/{index % 2}" for index in tensors["indices"].tolist()]
        save_file(tensors, path, {"categories": json.dumps(kinds)})
    old = {"target": "tiny", "target_digest": "d" * 64, "temperature": 0.8, "skipped": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    found = data_of(read_texts(tiny_checkpoint, [tmp_path], ()), tiny_checkpoint)
    assert torch.equal(found.train.tokens, expected.train.tokens)
    assert found.train.kinds == expected.train.kinds
    assert len(read_texts(tiny_checkpoint, [tmp_path], (NORMED,))) == 9
    with pytest.raises(ForerunError, match="made with max_new_tokens None, now 12"):
        synthesize(tiny_checkpoint, prompts(9), tmp_path, CONFIG)


def test_damaged_shard_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    synthesize(tiny_checkpoint, prompts(5), tmp_path, CONFIG)
    path = tmp_path / "00001.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ForerunError, match=r"00001\.safetensors: damaged shard"):
        read_texts(tiny_checkpoint, [tmp_path], ())
    with pytest.raises(ForerunError, match="no data in it"):
        read_texts(tiny_checkpoint, [tmp_path / "nowhere"], ())
