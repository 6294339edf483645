"""A tiny checkpoint to synthesise with and to train for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_target: tuple[Any, dict[str, Any]]) -> Any:
    """The tiny target with a tokenizer of one token a byte and no chat template."""
    pytest.importorskip("torch")
    from forerun.models.checkpoint import Checkpoint

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    config, weights = tiny_target
    return Checkpoint(
        *("tiny", config, weights, tokenizer, None, "<s>", "</s>", (60, 257), False, "d" * 64)
    )


@pytest.fixture(scope="session")
def deep_checkpoint(tiny_checkpoint: Any) -> Any:
    """The tiny target with six layers, so that EAGLE-3 finds three to read."""
    config, weights = tiny_checkpoint.config, six_layers(tiny_checkpoint.weights, 0.5)
    return replace(tiny_checkpoint, config=replace(config, num_layers=6), weights=weights)


def six_layers(weights: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """A target's two layers over and over, those added scaled."""
    deep = dict(weights)
    for name, weight in weights.items():
        for layer in range(2, 6):
            if name.startswith(f"model.layers.{layer % 2}."):
                rest = name.split(".", 3)[3]
                deep[f"model.layers.{layer}.{rest}"] = weight * scale
    return deep


CHAT = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}({{ message.role }}) {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant) {% endif %}"
)
"""A chat template in which every role can be told from the others."""


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_folder: Path) -> Path:
    """That folder with a chat template, and enough stop tokens for answers of all lengths."""
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_checkpoint_folder, folder)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = {"eos_token_id": [257, *range(128, 256, 8)]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    return folder


@pytest.fixture(scope="session")
def deep_chat_folder(tmp_path_factory: pytest.TempPathFactory, chat_folder: Path) -> Path:
    """That folder with six layers, its two over and over."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("deep") / "tiny"
    shutil.copytree(chat_folder, folder)
    (path,) = folder.glob("*.safetensors")
    save_file(six_layers(load_file(path), 1.0), path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kinds = {"layer_types": config["layer_types"] * 3} if "layer_types" in config else {}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6, **kinds}))
    return folder


@pytest.fixture(scope="session")
def texts_of() -> Callable[..., list[Any]]:
    """`texts_of(checkpoint, layers, count=24)`: prompts in the tiny target's alphabet, and what it
    says to them, greedily, with its feature `layers`. Every sixth is held out."""
    torch = pytest.importorskip("torch")
    from forerun.models.drafter import NORMED
    from forerun.models.target import Target
    from forerun.training.texts import Text, features_of

    def make(checkpoint: Any, layers: Sequence[int], count: int = 24) -> list[Any]:
        target = Target(checkpoint.config, checkpoint.weights, 96, "torch").eval()
        hidden, texts = checkpoint.config.hidden_size, []
        for number in range(count):
            prompt, answer = 3 + number % 5, 8 + number % 7
            tokens = 40 + (number + torch.arange(prompt)) % 10
            for _ in range(answer):
                both = features_of(target, [tokens], [*layers, NORMED])[0]
                following = target.head(both[-1:, -hidden:]).argmax(-1)
                tokens = torch.cat([tokens, following])
            both = features_of(target, [tokens], [*layers, NORMED])[0]
            states, features = both[prompt - 1 : -1, -hidden:], both[:, :-hidden]
            texts.append(Text(tokens, prompt, features, states, "loop", number % 6 == 0, True))
        return texts

    return make


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """(a 1 for each training step so far, at which of them a run is killed)"""
    from forerun.training import fit

    step, calls, deadly = fit._step, [], []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) in deadly:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(fit, "_step", counted)
    return calls, deadly


@pytest.fixture
def assert_kills_change_nothing(
    steps_taken: tuple[list[int], list[int]], tmp_path: Path
) -> Callable[..., int]:
    """`assert_kills_change_nothing(train, files)`: a run killed in its middle, and again three
    steps later, ends with the `files` of a run that was not. Returns that one's steps.

    `train` writes into the folder it is given, `whole` or `killed` by its name.
    """
    calls, deadly = steps_taken

    def check(train: Callable[[Path], None], files: Sequence[str]) -> int:
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        train(whole)
        steps = len(calls)
        deadly[:] = [steps + steps // 2, steps + steps // 2 + 3]
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train(killed)
        train(killed)
        for name in files:
            assert (whole / name).read_bytes() == (killed / name).read_bytes()
        return steps

    return check
