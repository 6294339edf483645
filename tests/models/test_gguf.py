"""GGUF files written with the gguf package, and SmolLM2's own, against transformers' reading."""

from __future__ import annotations

import json
import random
import re
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from forerun.errors import ForerunError
from forerun.models.checkpoint import Checkpoint, load_checkpoint, shipped_file
from forerun.models.rope import inverse_frequencies

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 400,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama-biases": LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**SIZES),
}
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "hello world  two spaces",
    "   leading and trailing   ",
    "tabs\tand\nnewlines\n\n\r\n mixed \n",
    "I'm you're WE'LL they'd it's 'tis",
    "0 1 12 123 1234 12345678901",
    "3.14159 -2e10 1,000,000 0x1F",
    "½ ² Ⅳ ٣٤ ४५",
    "def f(x):\n    return x ** 2  # squared\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    '{"name": "get_weather", "arguments": {"city": "Zürich"}}',
    "SELECT * FROM t WHERE a='b';",
    "https://example.com/path?q=1&r=%20",
    "Grüße aus Köln, naïve café",
    "cafe\u0301 e\u0301\u0308 n\u0303",
    "日本語のテキストと中文字符",
    "한국어 텍스트",
    "Привет, мир!",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic",
    "math ∑∫√ ≤ ≥ → ⇒",
    "snake_case camelCase kebab-case SCREAMING_CASE",
    "...!!!???---===+++",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>a<|endoftext|> b <|im_end|>",
    "<|im_start <im_end|> not special",
    "\x00\x01\x7f control",
    "a" * 100,
    "The quick brown fox jumps over the lazy dog. " * 3,
]


def trained_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges over all bytes, learnt from TEXTS, with three special tokens in front."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=395,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "123 456 12 99 the then there ab abc"] * 3, trainer)
    vocabulary = tokenizer.get_vocab()
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return sorted(vocabulary, key=lambda text: vocabulary[text]), merges


TOKENS, MERGES = trained_vocabulary()


def llama_cpp_rows(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a query or key projection as llama.cpp's converter stores them: row by row."""
    per_head = weight.shape[0] // heads
    order = [
        head * per_head + member * per_head // 2 + pair
        for head in range(heads)
        for pair in range(per_head // 2)
        for member in (0, 1)
    ]
    return weight[order]


def tiny_model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return model


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: Kind = Kind.F32,
    pre: str = "qwen2",
    alter: Callable[[gguf.GGUFWriter], Any] | None = None,
    skip: str = "",
) -> dict[str, torch.Tensor]:
    """Write `model` as llama.cpp's converter would; the dequantised weights by HF name."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = model.model.layers[0].self_attn.head_dim
    if config.model_type == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")

    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    expected: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or name == skip:
            continue
        values = weight.numpy()
        kind_here = kind if values.ndim > 1 else Kind.F32
        raw = gguf.quants.quantize(values, kind_here)
        expected[name] = torch.from_numpy(gguf.quants.dequantize(raw, kind_here).copy())
        if config.model_type in ("llama", "smollm3"):
            if ".q_proj." in name:
                raw = llama_cpp_rows(raw, config.num_attention_heads)
            if ".k_proj." in name:
                raw = llama_cpp_rows(raw, config.num_key_value_heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, raw, raw_dtype=kind_here)
    if alter is not None:
        alter(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def transformers_weights(file: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """What transformers reads from a GGUF file (its from_pretrained, but without accelerate)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    tensors: dict[str, torch.Tensor] = read["tensors"]
    return tensors


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_model(CONFIGS["llama"]))
    return path


@pytest.mark.parametrize("case", CONFIGS)
def test_file_equals_the_model_it_was_written_from(case: str, tmp_path: Path) -> None:
    path, model = tmp_path / "tiny.gguf", tiny_model(CONFIGS[case])
    expected = write_gguf(path, model)
    loaded = load_checkpoint(path)
    assert loaded.name == "tiny.gguf"
    assert loaded.weights.keys() == expected.keys()
    assert all(torch.equal(loaded.weights[name], expected[name]) for name in expected)
    config, saved, attention = loaded.config, model.config, model.model.layers[0].self_attn
    assert config.architecture == saved.model_type
    assert config.head_dim == attention.head_dim
    assert config.rope.dim == 2 * len(model.model.rotary_emb.inv_freq)
    assert config.rope.theta == saved.rope_parameters["rope_theta"]
    assert config.vocab_size == saved.vocab_size
    assert config.max_positions == saved.max_position_embeddings
    assert config.rms_norm_eps == pytest.approx(saved.rms_norm_eps)
    assert config.tie_embeddings == saved.tie_word_embeddings
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.output_bias == (attention.o_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")
    for layer, part in enumerate(model.model.layers):
        assert config.rotates(layer) == bool(getattr(part.self_attn, "use_rope", True))
        assert not config.slides(layer)


def test_rows_equal_transformers_reading(llama: Path) -> None:
    """That the row order above is llama.cpp's, by transformers' own reader."""
    reference = transformers_weights(llama, CONFIGS["llama"])
    loaded = load_checkpoint(llama).weights
    assert all(torch.equal(loaded[name], reference[name]) for name in loaded)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_quantised_weights(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, tiny_model(CONFIGS["llama"]), kind=kind)
    loaded = load_checkpoint(path).weights
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_special_tokens(llama: Path) -> None:
    loaded = load_checkpoint(llama)
    assert (loaded.bos_token, loaded.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert loaded.stop_ids == (0, 2)
    assert not loaded.add_bos
    assert loaded.chat_template == "{{ messages }}"
    ids = loaded.tokenizer.encode("<|im_start|>a", add_special_tokens=False).ids
    assert loaded.tokenizer.decode(ids) == "a"
    assert loaded.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a"


def test_user_defined_tokens_and_more_stops(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    def alter(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.token_type"]
        writer.add_token_types([3, 4, 3] + [1] * (len(TOKENS) - 3))
        writer.add_eot_token_id(9)
        writer.add_add_bos_token(True)

    write_gguf(path, tiny_model(CONFIGS["llama"]), alter=alter)
    loaded = load_checkpoint(path)
    assert loaded.stop_ids == (0, 2, 9)
    assert loaded.add_bos
    assert loaded.tokenizer.encode("<|im_start|>").ids == [1]
    assert loaded.tokenizer.decode([1]) == "<|im_start|>"


@pytest.fixture(scope="session")
def qwen2_reference() -> Tokenizer:
    vocabulary = {text: index for index, text in enumerate(TOKENS)}
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=pairs).backend_tokenizer
    tokenizer.add_special_tokens(TOKENS[:3])
    return tokenizer


@pytest.fixture(scope="session")
def llama3_reference() -> Tokenizer:
    """transformers' converter of Llama 3's tiktoken file, given this vocabulary."""
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    converter = TikTokenConverter("", extra_special_tokens=TOKENS[:3])
    vocabulary = {text: index for index, text in enumerate(TOKENS)}
    converter.extract_vocab_merges_from_model = lambda file: (vocabulary, pairs)
    return converter.converted()


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_tokenizer_equals_transformers(
    pre: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = {"qwen2": "qwen2_reference", "llama-bpe": "llama3_reference"}[pre]
    reference: Tokenizer = request.getfixturevalue(name)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(CONFIGS["qwen2"]), pre=pre)
    loaded = load_checkpoint(path)
    assert loaded.add_bos == (pre == "llama-bpe")
    for text in TEXTS:
        ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False).ids, text
        decoded = loaded.tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == (normalizers.NFC().normalize_str(text) if pre == "qwen2" else text)


def llama3_factors() -> tuple[LlamaConfig, list[float]]:
    """A Llama 3.1 configuration and the divisors that llama.cpp's converter would store."""
    config = LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    return config, (plain / scaled).tolist()


def test_llama3_factors_tensor(tmp_path: Path) -> None:
    config, factors = llama3_factors()
    path = tmp_path / "tiny.gguf"

    def alter(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    write_gguf(path, tiny_model(config), alter=alter)
    rope = load_checkpoint(path).config.rope
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    for capacity in (16, 256):
        frequencies, attention = inverse_frequencies(rope, 256, capacity)
        torch.testing.assert_close(frequencies, expected)
        assert attention == 1.0


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_metadata(kind: str, tmp_path: Path) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = 64
    config = Qwen2Config(**SIZES, rope_parameters=dict(parameters))

    def alter(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(config), alter=alter)
    rope = load_checkpoint(path).config.rope
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    frequencies, attention = inverse_frequencies(rope, 256, 256)
    torch.testing.assert_close(frequencies, expected)
    assert attention == pytest.approx(factor)


def test_longrope_tensors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    def alter(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_attn_factors(1.25)
        writer.add_tensor("rope_factors_short.weight", np.full(8, 2.0, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.full(8, 4.0, np.float32))

    write_gguf(path, tiny_model(CONFIGS["llama"]), alter=alter)
    rope = load_checkpoint(path).config.rope
    short, attention = inverse_frequencies(rope, 256, 64)
    long, _ = inverse_frequencies(rope, 256, 65)
    assert torch.equal(short, 2 * long)
    assert attention == 1.25


def test_mistral_window(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(
        path, tiny_model(CONFIGS["llama"]), alter=lambda writer: writer.add_sliding_window(16)
    )
    config = load_checkpoint(path).config
    assert config.window == 16 and all(config.sliding_layers)


def replaced(key: str, value: Any, kind: gguf.GGUFValueType) -> Callable[[gguf.GGUFWriter], None]:
    """Overwrite one metadata value (None: remove it)."""

    def alter(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, kind)

    return alter


U32, F32, TEXT, BOOL = (
    gguf.GGUFValueType.UINT32,
    gguf.GGUFValueType.FLOAT32,
    gguf.GGUFValueType.STRING,
    gguf.GGUFValueType.BOOL,
)
BREAKS: dict[str, tuple[Callable[[gguf.GGUFWriter], Any], str]] = {
    "architecture": (
        replaced("general.architecture", "gemma3", TEXT),
        "'gemma3', supported are llama, qwen2, qwen3, smollm3",
    ),
    "missing field": (
        replaced("llama.block_count", None, U32),
        "nothing under llama.block_count",
    ),
    "text field": (replaced("llama.context_length", "8", TEXT), "'8' under llama.context_length"),
    "zero": (replaced("llama.attention.head_count", 0, U32), "0 under llama.attention.head_coun"),
    "absurd layers": (replaced("llama.block_count", 2**31, U32), "under llama.block_count"),
    "not finite": (replaced("llama.rope.freq_base", float("nan"), F32), "nan under llama.rope"),
    "experts": (replaced("llama.expert_count", 8, U32), "mixture of experts"),
    "split": (replaced("split.count", 3, gguf.GGUFValueType.UINT16), "llama-gguf-split --merge"),
    "scaling": (replaced("llama.rope.scaling.type", "longrope", TEXT), "scaling 'longrope'"),
    "partial": (replaced("llama.rope.dimension_count", 8, U32), "rotates 8 of 16 dimensions"),
    "pre": (
        replaced("tokenizer.ggml.pre", "tekken", TEXT),
        "split 'tekken', supported are 'gpt2' with smollm, llama-bpe.*qwen2",
    ),
    "model": (replaced("tokenizer.ggml.model", "llama", TEXT), "kind 'llama'"),
    "no merges": (
        replaced("tokenizer.ggml.merges", None, TEXT),
        "no list of str under 'tokenizer.ggml.merges'",
    ),
    "eos": (replaced("tokenizer.ggml.eos_token_id", 4000, U32), "eos_token_id 4000, which is not"),
    "merges": (
        lambda writer: (
            writer.kv_data[0].pop("tokenizer.ggml.merges"),
            writer.add_token_merges(["zz yy"]),
        ),
        "merges that do not fit its tokens",
    ),
    "types": (
        lambda writer: (
            writer.kv_data[0].pop("tokenizer.ggml.token_type"),
            writer.add_token_types([1]),
        ),
        "395 tokens but 1 token types",
    ),
    "extra tensor": (
        lambda writer: writer.add_tensor("blk.0.novel.weight", np.zeros(4, np.float32)),
        "'blk.0.novel.weight' that the architecture 'llama' does not use",
    ),
    "alignment": (replaced("general.alignment", "x", TEXT), "alignment is 'x'"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_wrong_file_is_one_clear_line(case: str, tmp_path: Path) -> None:
    alter, message = BREAKS[case]
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model(CONFIGS["llama"]), alter=alter)
    with pytest.raises(ForerunError, match=message) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_missing_tensor_and_wrong_shape(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    name = "model.layers.2.mlp.up_proj.weight"
    write_gguf(path, tiny_model(CONFIGS["llama"]), skip=name)
    with pytest.raises(ForerunError, match=f"lacks the tensor '{name}'"):
        load_checkpoint(path)
    alter = replaced("llama.feed_forward_length", 97, U32)
    write_gguf(path, tiny_model(CONFIGS["llama"]), alter=alter)
    with pytest.raises(ForerunError, match=r"of shape \[96, 64\], expected \[97, 64\]"):
        load_checkpoint(path)


def test_not_a_gguf_file(tmp_path: Path, llama: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    with pytest.raises(ForerunError, match="not a GGUF file"):
        load_checkpoint(path)
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ForerunError, match="does not start with GGUF"):
        load_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + llama.read_bytes()[8:])
    with pytest.raises(ForerunError, match="version 50331648"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<IQQ", 3, 2**60, 0), f"announces {2**60} tensors"),
        (struct.pack("<IQQ", 3, 0, 2**60), f"announces {2**60} metadata values"),
        (struct.pack("<IQQQ", 3, 0, 1, 2**62), f"announces {2**62} bytes"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62), f"announces {2**62} numbers"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**62), f"announces {2**62} texts"),
        (struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "an array of value type 9"),
        (struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"k", 77, 1), "unknown value type 77"),
        (struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"\xff", 4, 1), "not UTF-8"),
        (struct.pack("<IQQQ1sIQQQ", 3, 1, 0, 1, b"t", 2**31, 1, 1, 1), "2147483648 dimensions"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 999, 0), "unknown type 999"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**62, 0, 0), "tensor 't' ends at byte"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 0, 2**62), "tensor 't' ends at byte"),
        (struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0), "damaged at the tensor 't'"),
    ],
)
def test_forged_counts_end_at_once(header: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "forged.gguf"
    path.write_bytes(b"GGUF" + header + bytes(16))
    with pytest.raises(ForerunError, match=message):
        load_checkpoint(path)


def test_truncated_anywhere(llama: Path, tmp_path: Path) -> None:
    content = llama.read_bytes()
    path = tmp_path / "cut.gguf"
    for cut in (*range(0, 200, 7), *range(200, len(content), len(content) // 60)):
        path.write_bytes(content[:cut])
        with pytest.raises(ForerunError, match=r"truncated|damaged|not a GGUF"):
            load_checkpoint(path)


def test_flipped_bytes_never_crash(llama: Path, tmp_path: Path) -> None:
    """Any damage to the header either is a ForerunError or still is a valid file."""
    content, generator = llama.read_bytes(), random.Random(0)
    path = tmp_path / "flipped.gguf"
    header = content.index(b"blk.3.ffn_norm") + 100
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 1, 4))):
            damaged[generator.randrange(4, header)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            load_checkpoint(path)
        except ForerunError as error:
            assert len(str(error)) < 600


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    return load_checkpoint("smollm2")


def test_smollm2(smollm2: Checkpoint) -> None:
    config = smollm2.config
    assert (smollm2.name, config.architecture) == ("smollm2", "llama")
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.tie_embeddings) == (100_000.0, True)
    assert "lm_head.weight" not in smollm2.weights and len(smollm2.weights) == 272
    assert {smollm2.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")} == {0, 2}
    assert smollm2.stop_ids == (0, 2)
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert not smollm2.add_bos
    assert "<|im_start|>" in (smollm2.chat_template or "")


def test_smollm2_tokenizer_equals_transformers(smollm2: Checkpoint) -> None:
    file = shipped_file("smollm2")
    reference = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        # transformers drops the file's own split ("smollm": every numeral stands alone, then
        # GPT-2's words), so the reference gets the numerals one by one.
        numerals = "".join(sign for sign in text if unicodedata.category(sign)[0] == "N")
        parts = re.split(f"([{numerals}])", text) if numerals else [text]
        expected = [
            index
            for part in parts
            if part
            for index in reference.encode(part, add_special_tokens=False)
        ]
        ids = smollm2.tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == expected, text
        if numerals.isascii():
            assert ids == reference.encode(text, add_special_tokens=False), text
        assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_weights_equal_transformers(smollm2: Checkpoint) -> None:
    file = shipped_file("smollm2")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    reference = transformers_weights(file, config)
    assert set(reference) == set(smollm2.weights)
    for name, weight in smollm2.weights.items():
        assert torch.equal(weight, reference[name]), name
