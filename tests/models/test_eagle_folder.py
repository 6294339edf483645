"""EAGLE folders: each published layout, computed as transformers would; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.checkpoint import Checkpoint  # noqa: E402
from forerun.models.config import RopeConfig, TargetConfig  # noqa: E402
from forerun.models.drafter import NORMED, Committed  # noqa: E402
from forerun.models.drafters import find_drafter, load_drafter  # noqa: E402
from forerun.models.eagle_folder import save_eagle  # noqa: E402
from forerun.models.step import Step, StepInputs  # noqa: E402
from forerun.models.target import Target  # noqa: E402
from forerun.models.weights import tensor_shapes  # noqa: E402

HIDDEN, LAYERS, VOCABULARY, DRAFTS, SLOTS = 32, 8, 70, 20, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "vocab_size": VOCABULARY,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """A random target of eight layers."""
    sizes = (VOCABULARY, HIDDEN, 48, LAYERS, 4, 2, 8)
    config = TargetConfig("llama", *sizes, 1e-5, SLOTS, RopeConfig(10000.0, 8))
    draw = torch.Generator().manual_seed(4)
    weights = {
        name: torch.randn(*shape, generator=draw) * 0.2 + ("norm" in name)
        for name, shape in tensor_shapes(config)
    }
    rest = {"chat_template": None, "bos_token": None, "eos_token": None, "stop_ids": ()}
    return Checkpoint("tiny", config, weights, None, **rest, add_bos=False, digest="")  # type: ignore[arg-type]


def tensors(three: bool, prefix: str = "layers.0.", seed: int = 0) -> dict[str, Tensor]:
    """All that such a drafter needs, random, by published names."""
    draw = torch.Generator().manual_seed(seed)
    wide = HIDDEN * (2 if three else 1)
    shapes = {
        f"{prefix}self_attn.q_proj.weight": (32, wide),
        f"{prefix}self_attn.k_proj.weight": (16, wide),
        f"{prefix}self_attn.v_proj.weight": (16, wide),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, 32),
        f"{prefix}mlp.gate_proj.weight": (24, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (24, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, 24),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, HIDDEN * (3 if three else 2)),
    }
    if three:
        norms = (f"{prefix}input_layernorm", f"{prefix}hidden_norm", "norm")
        shapes |= {f"{name}.weight": (HIDDEN,) for name in norms}
        shapes["lm_head.weight"] = (DRAFTS, HIDDEN)
    return {
        name: torch.randn(*shape, generator=draw) * 0.3 + ("norm" in name)
        for name, shape in shapes.items()
    }


def vocabulary() -> dict[str, Tensor]:
    """`d2t` and `t2d` of every third token."""
    ids = torch.arange(DRAFTS) * 3 + 2
    kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids - torch.arange(DRAFTS), "t2d": kept}


def write(folder: Path, config: dict[str, Any], found: dict[str, Tensor], pickled: bool) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(found, folder / "pytorch_model.bin")
    else:
        save_file(found, folder / "model.safetensors")
    return folder


def eagle(folder: Path) -> dict[str, Tensor]:
    """SafeAILab's EAGLE-1/2: a pickle, `bias` left to its default, a copy of the embedding."""
    draw = torch.Generator().manual_seed(1)
    found = tensors(False) | {"fc.bias": torch.randn(HIDDEN, generator=draw)}
    found["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=draw)
    write(folder, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, found, True)
    return found


def eagle_without_bias(folder: Path) -> dict[str, Tensor]:
    found = tensors(False)
    write(folder, LLAMA | {"bias": False}, found, False)
    return found


def safeai(folder: Path) -> dict[str, Tensor]:
    """SafeAILab's EAGLE-3: `midlayer`, a pickle."""
    found = tensors(True, "midlayer.") | vocabulary()
    write(folder, LLAMA | {"draft_vocab_size": DRAFTS}, found, True)
    return found


def modelopt(folder: Path) -> dict[str, Tensor]:
    """ModelOpt's: ids of the layers that features leave, Llama 3's rotary scaling."""
    found = tensors(True) | {"d2t": vocabulary()["d2t"]}
    config = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFTS,
        "rope_scaling": LLAMA3,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, LAYERS // 2 - 1, LAYERS - 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "parallel_draft_step": 1,
        },
    }
    write(folder, config, found, False)
    return found


def speculators(folder: Path) -> dict[str, Tensor]:
    """Speculators': the layer's facts nested, more norms, and half the head rotated."""
    found = tensors(True) | vocabulary()
    draw = torch.Generator().manual_seed(2)
    found["embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=draw)
    found["input_norm.weight"] = 1 + torch.randn(3 * HIDDEN, generator=draw) * 0.3
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LLAMA | {"partial_rotary_factor": 0.5},
        "draft_vocab_size": DRAFTS,
        "eagle_aux_hidden_state_layer_ids": [2, LAYERS // 2, LAYERS - 3],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "target_hidden_size": None,
    }
    write(folder, config, found, False)
    return found


LAYOUTS = {
    "eagle": eagle,
    "eagle-without-bias": eagle_without_bias,
    "safeai": safeai,
    "modelopt": modelopt,
    "speculators": speculators,
}


def load(folder: Path, checkpoint: Checkpoint) -> Any:
    return load_drafter(find_drafter(str(folder)), checkpoint, SLOTS)


# --- what loads computes what transformers would -------------------------------------------------


def reference(found: dict[str, Tensor], config: dict[str, Any], context: Tensor, features: Tensor):
    """Log-probabilities `[V']` of the next token, by transformers' layers.

    `context` `[n]` are the embedded tokens after each feature.
    """
    found = {name.replace("midlayer.", "layers.0."): w for name, w in found.items()}
    nested = config.get("transformer_layer_config", config)
    llama = transformers.LlamaConfig(**{k: v for k, v in nested.items() if k != "architectures"})
    llama._attn_implementation = "eager"
    three = "norm.weight" in found
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer(llama, 0)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(llama)

    def norm(name: str, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], found[f"{name}.weight"], 1e-5)

    if three:
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(2 * HIDDEN, old.out_features, bias=False))
        if config.get("norm_before_fc"):
            features = norm("input_norm", features)
        features = features @ found["fc.weight"].T
        normed = norm("layers.0.hidden_norm", features)
        residual = normed if config.get("norm_before_residual") else features
        x = torch.cat([norm("layers.0.input_layernorm", context), normed], dim=-1)
    else:
        pair = torch.cat([context, features], dim=-1)
        residual = x = nn.functional.linear(pair, found["fc.weight"], found.get("fc.bias"))
    own = {
        name.removeprefix("layers.0."): w
        for name, w in found.items()
        if name.startswith(("layers.0.self", "layers.0.mlp", "layers.0.post"))
    }
    missing, unexpected = layer.load_state_dict(own, strict=False)
    assert (missing, unexpected) == (["input_layernorm.weight"], [])
    n = len(context)
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    places = torch.arange(n)[None]
    if "partial_rotary_factor" in nested:
        rotate = rotated_half(5000.0, 4, 8, n)
    else:
        rotate = rotary(x[None], places)
    mixed = layer.self_attn(x[None], position_embeddings=rotate, attention_mask=mask)[0][0]
    x = residual + mixed
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits = norm("norm", x) @ found["lm_head.weight"].T if three else x @ found["head"].T
    return logits[-1].log_softmax(-1)


def rotated_half(theta: float, rotated: int, dim: int, n: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for transformers' rotation, by which the last dimensions stay.

    Its pairs are (i, i + dim / 2), a partial rotation's (i, i + rotated / 2): see `permuted`.
    """
    frequencies = theta ** (-torch.arange(0, rotated, 2) / rotated)
    angles = torch.zeros(n, dim // 2)
    angles[:, : rotated // 2] = torch.arange(n)[:, None] * frequencies
    both = torch.cat([angles, angles], dim=-1)[None]
    return both.cos(), both.sin()


def permuted(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Query and key dimensions reordered so that a partial rotation's pairs lie half a head apart.

    Products of queries and keys don't depend on a common order.
    """
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    changed = dict(found)
    for name, weight in found.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            changed[name] = weight.unflatten(0, (-1, 8))[:, order].flatten(0, 1)
    return changed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_computes_what_transformers_does(
    checkpoint: Checkpoint, tmp_path: Path, layout: str
) -> None:
    found = LAYOUTS[layout](tmp_path)
    drafter = load(tmp_path, checkpoint)
    config = json.loads((tmp_path / "config.json").read_text())
    draw = torch.Generator().manual_seed(9)
    n = 30
    tokens = torch.randint(VOCABULARY, (n + 1,), generator=draw)
    features = torch.randn(n, HIDDEN * len(drafter.feature_layers), generator=draw)
    embedding = found.get("embed_tokens.weight", checkpoint.weights["model.embed_tokens.weight"])
    given = permuted(found) if layout == "speculators" else found
    given = given | {"head": checkpoint.weights["lm_head.weight"]}
    target = Target(checkpoint.config, checkpoint.weights, SLOTS)
    with torch.no_grad():
        expected = reference(given, config, embedding[tokens[1:]], features)
        proposal = propose(drafter, target, tokens, features)
    best = expected.topk(drafter.config.top_k)
    ids = best.indices
    if "d2t" in found:
        ids = ids + found["d2t"][ids]
    assert proposal.tokens[0, : len(ids)].tolist() == ids.tolist()
    torch.testing.assert_close(proposal.scores[0, : len(ids)], best.values, atol=1e-4, rtol=1e-4)


def propose(drafter: Any, target: Target, tokens: Tensor, features: Tensor) -> Any:
    """What the drafter proposes after `tokens` `[n + 1]`, of which all but the last have features,
    from a cache filled in two parts."""
    n = len(features)
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    states = [torch.zeros(1, 2, SLOTS, 8) for _ in drafter.states()]
    committed = None
    for start, count in ((0, n - 3), (n - 3, 3)):
        part = slice(start, start + count)
        committed = Committed(
            tokens=tokens[None, start : start + count + 1],
            start=zero + start,
            count=zero + count,
            root=tokens[start + count][None],
            features=features[None, part],
            hidden=features[None, -1],
            uniforms=torch.zeros(1, 1, SLOTS),
            temperature=one,
            top_k=zero,
            top_p=one,
            branching=False,
        )
        for state, rows in zip(states, drafter.remember(committed, states, target), strict=True):
            state[:, :, part] = rows
    return drafter.propose(committed, states, target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_drafter_loads_as_it_was(
    checkpoint: Checkpoint, tmp_path: Path, layout: str
) -> None:
    found = LAYOUTS[layout](tmp_path / "published")
    first = load(tmp_path / "published", checkpoint)
    renamed = {name.replace("midlayer.", "layers.0."): w for name, w in found.items()}
    save_eagle(tmp_path / "own", first.config, renamed, {"target": "tiny"})
    second = load(tmp_path / "own", checkpoint)
    assert second.config == first.config
    assert type(second) is type(first)
    state = second.state_dict()
    assert state.keys() == first.state_dict().keys()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, state[name]), name


# --- features, by tensor ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["eagle", "safeai", "modelopt", "speculators"])
def test_features_are_the_hidden_states_of_transformers(
    checkpoint: Checkpoint, tmp_path: Path, layout: str
) -> None:
    """EAGLE-3's 2, L/2, L-3 entering, whichever way a folder counts; EAGLE-1's after the norm."""
    LAYOUTS[layout](tmp_path)
    drafter = load(tmp_path, checkpoint)
    config = transformers.LlamaConfig(
        **LLAMA | {"num_hidden_layers": LAYERS, "intermediate_size": 48, "rope_theta": 10000.0},
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(checkpoint.weights)
    tokens = torch.tensor([[5, 9, 0, 33, 2, 60]])
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
        seen = committed_of(Target(checkpoint.config, checkpoint.weights, SLOTS), drafter, tokens)
    if layout == "eagle":
        expected = states[LAYERS]  # transformers norms the last one
    else:
        expected = torch.cat([states[2], states[LAYERS // 2], states[LAYERS - 3]], dim=-1)
    found = seen.features[:, : int(seen.count[0])]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert seen.tokens[:, : tokens.shape[1]].tolist() == tokens.tolist()


def committed_of(target: Target, drafter: Any, tokens: Tensor) -> Committed:
    """What a prefill of `tokens` hands to the drafter."""
    seen: list[Committed] = []
    propose = drafter.propose
    drafter.propose = lambda *operands: seen.append(operands[0]) or propose(*operands)
    from forerun.compiler.eager import EagerStep

    eager = EagerStep(Step(target, drafter), SLOTS)
    inputs: StepInputs = eager.prefill_inputs(tokens[0].tolist(), [tokens.shape[1] - 1], 5)
    eager.run(inputs)
    return seen[-1]


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 8]}, (1, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7]}}, (1, 8)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, (NORMED,)),
    ],
)
def test_layer_ids_by_either_convention(
    checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any], layers: tuple[int, ...]
) -> None:
    found = tensors(True) | vocabulary()
    found["fc.weight"] = torch.ones(HIDDEN, HIDDEN * len(layers))
    if layers == (NORMED,):
        del found["fc.weight"]
    write(tmp_path, LLAMA | {"draft_vocab_size": DRAFTS} | change, found, False)
    assert load(tmp_path, checkpoint).feature_layers == layers


# --- what a folder may leave out ----------------------------------------------------------------


def test_a_copy_of_the_target_s_embedding_is_shared(checkpoint: Checkpoint, tmp_path: Path) -> None:
    copy = checkpoint.weights["model.embed_tokens.weight"].to(torch.float16)
    write(tmp_path, LLAMA | {"bias": False}, tensors(False) | {"embed_tokens.weight": copy}, False)
    assert load(tmp_path, checkpoint).embed is None
    copy[3, 3] += 1
    write(tmp_path, LLAMA | {"bias": False}, tensors(False) | {"embed_tokens.weight": copy}, False)
    assert load(tmp_path, checkpoint).embed is not None


def test_a_drafter_over_the_whole_vocabulary_may_share_the_head(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    found = tensors(True)
    del found["lm_head.weight"]
    write(tmp_path, LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, found, False)
    drafter = load(tmp_path, checkpoint)
    assert drafter.head is None
    assert drafter.ids is None


# --- what is refused -----------------------------------------------------------------------------


def refused(checkpoint: Checkpoint, folder: Path, match: str) -> None:
    with pytest.raises(ForerunError, match=match) as caught:
        load(folder, checkpoint)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fc.weight": None}, "'fc.weight' is missing"),
        ({"fc.weight": torch.ones(HIDDEN, HIDDEN)}, r"'fc.weight' has shape .*expected \[32, 96\]"),
        ({"midlayer.hidden_norm.weight": None}, "'midlayer.hidden_norm.weight' is missing"),
        ({"midlayer.mlp.gate.weight": torch.ones(2)}, "unknown key 'midlayer.mlp.gate.weight'"),
        ({"norm.weight": torch.ones(HIDDEN, dtype=torch.int64)}, "'norm.weight' is of type"),
        ({"lm_head.weight": None}, "'lm_head.weight' is missing"),
        ({"d2t": None}, "'d2t' is missing"),
        ({"d2t": torch.full((DRAFTS,), VOCABULARY)}, "'d2t' reaches from token 70 to 89"),
        ({"d2t": torch.full((DRAFTS,), -1)}, "'d2t' reaches from token -1"),
        ({"d2t": -torch.arange(DRAFTS)}, "'d2t' names a token twice"),
        ({"d2t": torch.zeros(DRAFTS)}, "'d2t' is torch.float32"),
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, r"'d2t' is torch.int64 \[3\]"),
        ({"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}, "'t2d' .* does not mark"),
        ({"t2d": torch.zeros(3, dtype=torch.bool)}, r"'t2d' \[3\] does not mark"),
    ],
)
def test_tensors_that_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    found = safeai(tmp_path) | change
    found = {name: w for name, w in found.items() if w is not None}
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTS}
    write(tmp_path, config, found, True)
    refused(checkpoint, tmp_path, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": 16}, "hidden_size is 16, but the target's is 32"),
        ({"target_hidden_size": 16}, "target_hidden_size is 16, but the target's is 32"),
        ({"vocab_size": 90}, "vocab_size is 90, but the target's is 70"),
        ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2, expected 1"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"draft_vocab_size": 71}, "'draft_vocab_size' is 71"),
        ({"draft_vocab_size": 5}, "'draft_vocab_size' is 5, expected at least top_k, 8"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3, expected a divisor of 4"),
        ({"rope_scaling": {"rope_type": "odd"}}, "unknown rotary scaling 'odd'"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, r"layer_ids' is \[2, 9\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [8]}}, "eagle_config.*layer_ids'"),
        ({"eagle_config": {"use_last_layernorm": False}}, "'use_last_layernorm' is False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "'parallel_draft_step' is 4, expected 1"),
        ({"speculators_model_type": "eagle3"}, "'norm_before_residual' is missing"),
        ({"tree": {"depth": 60, "top_k": 60}}, "tree: the field 'top_k'"),
        ({"tree": {"depth": 0}}, "tree: the field 'depth' is 0"),
    ],
)
def test_configurations_that_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    found = safeai(tmp_path)
    write(tmp_path, LLAMA | {"draft_vocab_size": DRAFTS} | change, found, True)
    refused(checkpoint, tmp_path, match)


def test_a_pickle_that_holds_code_is_not_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    eagle(tmp_path)
    torch.save({"fc.weight": Trap()}, tmp_path / "pytorch_model.bin")
    refused(checkpoint, tmp_path, "pytorch_model.bin")
    assert not (tmp_path / "ran").exists()


def test_an_ordinary_model_of_one_layer_is_no_eagle(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = {f"model.{name}": w for name, w in tensors(False).items() if name != "fc.weight"}
    write(tmp_path, LLAMA, found, False)
    assert find_drafter(str(tmp_path)).kind == "draft"
