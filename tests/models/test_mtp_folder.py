"""MTP blocks on disk: beside a target's own layers as MiMo has it, our folders; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import BPE  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.checkpoint import Checkpoint, load_checkpoint  # noqa: E402
from forerun.models.drafter import NORMED, Drafter  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter  # noqa: E402
from forerun.models.mtp_folder import save_mtp  # noqa: E402
from forerun.models.step import Step  # noqa: E402
from forerun.models.target import Target  # noqa: E402
from forerun.models.torch_bundle import write_step  # noqa: E402

HIDDEN, VOCABULARY, SLOTS, PREFIX = 32, 40, 96, "model.mtp_layers.0."
QWEN2 = transformers.Qwen2Config(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=SLOTS,
    bos_token_id=0,
    eos_token_id=1,
)


def block(seed: int = 5) -> dict[str, Tensor]:
    """A random block by MiMo's names, without their prefix: a Qwen2 layer and what is around it."""
    torch.manual_seed(seed)
    layer = transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer(QWEN2, 0)
    shapes = {name: tuple(w.shape) for name, w in layer.state_dict().items()}
    shapes["input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    shapes |= {f"{n}_layernorm.weight": (HIDDEN,) for n in ("token", "hidden", "final")}
    return {name: torch.randn(s) * 0.3 + ("layernorm" in name) for name, s in shapes.items()}


def mimo(folder: Path, change: dict[str, Tensor | None] | None = None, **config: Any) -> Any:
    """A target with its block in the same folder, of which one tensor lies in a second shard."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(QWEN2).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
    }
    path.write_text(json.dumps(values | config))
    found = {PREFIX + name: w for name, w in (block() | (change or {})).items() if w is not None}
    apart = {name: w for name, w in found.items() if name.endswith("final_layernorm.weight")}
    main = load_file(folder / "model.safetensors") | found
    main = {name: w for name, w in main.items() if name not in apart}
    (folder / "model.safetensors").unlink()
    files = {"model-1.safetensors": main}
    if apart:
        files["model-2.safetensors"] = apart
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    Tokenizer(BPE({"a": 0, "b": 1}, [])).save(str(folder / "tokenizer.json"))
    return model


def load(folder: Path, checkpoint: Checkpoint) -> Any:
    return load_drafter(find_drafter(str(folder)), checkpoint, SLOTS)


def test_a_target_that_comes_with_a_block_is_read_as_both(tmp_path: Path) -> None:
    model = mimo(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.weights.keys() == model.state_dict().keys()
    target = Target(checkpoint.config, checkpoint.weights, SLOTS)
    drafter = load(tmp_path, checkpoint)
    assert drafter.kind == "mtp"
    assert drafter.feature_layers == (NORMED,)
    assert (drafter.config.depth, drafter.config.top_k) == (5, 1)
    found = drafter.attention.query.bias
    assert torch.equal(found, block()["self_attn.q_proj.bias"])
    assert target.config.qkv_bias


def test_the_chain_is_what_transformers_layers_give(tmp_path: Path, run_step: Any) -> None:
    """One block, applied to its own output: rows of the prompt from the target's true states."""
    model = mimo(tmp_path)
    checkpoint, weights = load_checkpoint(tmp_path), block()
    step = Step(
        Target(checkpoint.config, checkpoint.weights, SLOTS).eval(), load(tmp_path, checkpoint)
    )
    with torch.no_grad():
        run = run_step(step, [5, 9, 0, 33, 2, 17], 9, 6)
        text = torch.tensor([5, 9, 0, 33, 2, 17, *run.tokens[0]])
        states = model(text[None, :-1], output_hidden_states=True).hidden_states[-1][0]
        expected = chain(weights, model.model.embed_tokens, model.lm_head, text, states, 5)
    assert run.last.tokens[0].tolist() == [int(text[-1]), *expected]


def chain(
    weights: dict[str, Tensor],
    embed: nn.Module,
    head: nn.Module,
    text: Tensor,
    states: Tensor,
    gamma: int,
) -> list[int]:
    """FastMTP's recursion in loops, over transformers' decoder layer."""
    modeling = transformers.models.qwen2.modeling_qwen2
    layer = modeling.Qwen2DecoderLayer(QWEN2, 0)
    inner = {name: w for name, w in weights.items() if name in layer.state_dict()}
    layer.load_state_dict(inner)
    rotary = modeling.Qwen2RotaryEmbedding(QWEN2)

    def norm(name: str, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (HIDDEN,), weights[f"{name}_layernorm.weight"], 1e-6)

    tokens, drafted = text.tolist(), []
    for _ in range(gamma):
        pair = torch.cat(
            [norm("hidden", states), norm("token", embed(torch.tensor(tokens[1:])))], dim=-1
        )
        x, n = pair @ weights["input_proj.weight"].T, len(states)
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        turned = rotary(x[None], torch.arange(n)[None])
        out = layer(x[None], position_embeddings=turned, attention_mask=mask)
        out = out[0] if isinstance(out, tuple) else out
        following = norm("final", out.reshape(n, HIDDEN)[-1:])
        drafted.append(int(head(following).argmax()))
        tokens.append(drafted[-1])
        states = torch.cat([states, following])
    return drafted


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}])
def test_the_loaded_block_changes_no_token(
    tmp_path: Path, run_step: Any, sampling: dict[str, Any]
) -> None:
    mimo(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    target = Target(checkpoint.config, checkpoint.weights, SLOTS).eval()
    plain = run_step(Step(target, Drafter(), 6), [5, 9, 0, 33], 40, 1, **sampling)
    drafted = run_step(Step(target, load(tmp_path, checkpoint)), [5, 9, 0, 33], 40, 6, **sampling)
    assert drafted.tokens == plain.tokens


def test_a_saved_block_loads_as_it_was(tmp_path: Path) -> None:
    mimo(tmp_path / "target")
    checkpoint = load_checkpoint(tmp_path / "target")
    first = load(tmp_path / "target", checkpoint)
    save_mtp(tmp_path / "own", first.config, block(), {"target": "tiny"})
    second = load(tmp_path / "own", checkpoint)
    assert second.config == first.config
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "config", "match"),
    [
        ({"input_proj.weight": None}, {}, "'input_proj.weight' is missing"),
        ({"final_layernorm.weight": None}, {}, "'final_layernorm.weight' is missing"),
        ({"input_proj.weight": torch.ones(HIDDEN, HIDDEN)}, {}, r"expected \[32, 64\]"),
        ({"token_layernorm.weight": torch.ones(HIDDEN, dtype=torch.int32)}, {}, "is of type"),
        ({"mlp.experts.weight": torch.ones(2)}, {}, "unknown key 'mlp.experts.weight'"),
        ({}, {"num_nextn_predict_layers": 2}, "'num_nextn_predict_layers' is 2, expected 1"),
        ({}, {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({}, {"vocab_size": 41}, "vocab_size is 41, but the target's is 40"),
        ({}, {"hidden_size": 16}, "hidden_size is 16, but the target's is 32"),
        ({}, {"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({}, {"tree": {"depth": 0}}, "tree: the field 'depth' is 0"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, change: dict[str, Tensor | None], config: dict[str, Any], match: str
) -> None:
    mimo(tmp_path / "target")
    checkpoint = load_checkpoint(tmp_path / "target")
    mimo(tmp_path / "drafter", change, **config)
    with pytest.raises(ForerunError, match=match) as caught:
        load(tmp_path / "drafter", checkpoint)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "drafter") in str(caught.value)


def test_a_damaged_shard_is_one_line(tmp_path: Path) -> None:
    mimo(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ForerunError, match=r"model-2.safetensors: damaged") as caught:
        load(tmp_path, checkpoint)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    mimo(tmp_path / "target")
    checkpoint = load_checkpoint(tmp_path / "target")
    folder = tmp_path / "pickled"
    save_mtp(folder, load(tmp_path / "target", checkpoint).config, block(), {})
    (folder / "model.safetensors").unlink()
    torch.save(block(), folder / "pytorch_model.bin")
    with pytest.raises(ForerunError, match="only pickled weights"):
        load(folder, checkpoint)


def test_a_torch_bundle_holds_the_block_and_not_the_target_again(tmp_path: Path) -> None:
    mimo(tmp_path / "mimo")
    checkpoint = load_checkpoint(tmp_path / "mimo")
    source = find_drafter(str(tmp_path / "mimo"))
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write_step(bundle, checkpoint, source, "fp32", "stacked", "matching")
    assert {path.name for path in (bundle / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    copied, wanted = load_file(bundle / "drafter" / "model.safetensors"), block()
    assert copied.keys() == wanted.keys()
    assert all(torch.equal(copied[name], wanted[name]) for name in wanted)
    drafters = [
        load_drafter(replace(source, folder=folder), checkpoint, SLOTS).state_dict()
        for folder in (tmp_path / "mimo", bundle / "drafter")
    ]
    assert drafters[0].keys() == drafters[1].keys()
    assert all(torch.equal(drafters[0][name], drafters[1][name]) for name in drafters[0])
