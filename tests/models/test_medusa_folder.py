"""Medusa folders: what loads, how it computes, and what is refused in one clear line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from forerun.errors import ForerunError  # noqa: E402
from forerun.models.medusa import MedusaConfig  # noqa: E402
from forerun.models.medusa_folder import WEIGHTS, load_medusa, save_medusa  # noqa: E402
from forerun.models.target import Target  # noqa: E402

HIDDEN, VOCABULARY = 32, 260
TINY = tuple[Any, dict[str, Any]]


@pytest.fixture
def target(tiny_target: TINY) -> Target:
    return Target(*tiny_target, 64)


@pytest.fixture
def matrix(tiny_target: TINY) -> Any:
    return tiny_target[1]["lm_head.weight"]


def tensors(heads: int = 2, layers: int = 2, own: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {}
    for i in range(heads):
        for j in range(layers):
            found[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=draw) * 0.2
            found[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=draw)
        if own:
            found[f"{i}.{layers}.weight"] = torch.randn(own, HIDDEN, generator=draw)
    return found


def save(folder: Path, found: dict[str, Any], **facts: Any) -> None:
    config = MedusaConfig(2, 2, HIDDEN, 2, ((0.5, 0.2), (0.3, 0.1)))
    save_medusa(folder, config, found, {"target": "tiny", **facts})


def reference(found: dict[str, Any], hidden: Any, output: Any, heads: int, layers: int) -> Any:
    """Medusa's own formula, head by head: `[n, heads, V']`."""
    rows = []
    for i in range(heads):
        x = hidden
        for j in range(layers):
            weight, bias = found[f"{i}.{j}.linear.weight"], found[f"{i}.{j}.linear.bias"]
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        rows.append(x @ (output[i] if isinstance(output, list) else output).T)
    return torch.stack(rows, dim=1)


def logits(heads: Any, hidden: Any) -> Any:
    features = heads.features(hidden)
    if len(heads.heads) == 1:
        return heads.heads[0](features)
    return torch.stack([head(features[:, i]) for i, head in enumerate(heads.heads)], dim=1)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_round_trip(target: Target, matrix: Any, tmp_path: Path, reduced: bool, own: bool) -> None:
    ids = torch.tensor([7, 0, 259, 31], dtype=torch.int32)
    found = tensors(own=(4 if reduced else VOCABULARY) if own else 0)
    save(tmp_path, found | ({"ids": ids} if reduced else {}))
    heads = load_medusa(tmp_path, matrix)
    assert heads.config == MedusaConfig(2, 2, HIDDEN, 2, ((0.5, 0.2), (0.3, 0.1)))
    assert (heads.ids is None) != reduced
    output = [found["0.2.weight"], found["1.2.weight"]] if own else matrix
    if reduced and not own:
        output = matrix[ids.long()]
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(logits(heads, hidden), reference(found, hidden, output, 2, 2))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 3), (6,)])
def test_trimmed_heads_draft_the_same_trees(
    target: Target, matrix: Any, tmp_path: Path, own: bool, sizes: tuple[int, ...]
) -> None:
    config = MedusaConfig(3, 2, HIDDEN, 4, ((0.5, 0.3, 0.1, 0.05),) * 3)
    save_medusa(tmp_path, config, tensors(heads=3, own=VOCABULARY if own else 0), {})
    whole, trimmed = load_medusa(tmp_path, matrix), load_medusa(tmp_path, matrix)
    trimmed.trim(sizes)
    trees = [trimmed.tree(nodes) for nodes in sizes]
    assert trimmed.candidates <= max(1, max(sizes) - 1) ** 2
    assert trimmed.max_depth() == max(1, *(tree.depth for tree in trees))
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    committed = SimpleNamespace(hidden=hidden)
    for nodes, tree in zip(sizes, trees, strict=True):
        expected = whole.tree(nodes)
        assert tree.parents == expected.parents
        drafted = [
            heads.draft(committed, [], target)[:, np.asarray(which.slots[1:], int) - 1]  # type: ignore[arg-type]
            for heads, which in ((whole, expected), (trimmed, tree))
        ]
        assert torch.equal(*drafted)


def test_half_precision_is_read_as_float32(target: Target, matrix: Any, tmp_path: Path) -> None:
    save(tmp_path, {name: tensor.half() for name, tensor in tensors().items()})
    heads = load_medusa(tmp_path, matrix)
    assert heads.blocks[0].weight.dtype == heads.heads[0].weight.dtype == torch.float32


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_published_folders(
    target: Target, matrix: Any, tmp_path: Path, prefix: str, name: str
) -> None:
    found = tensors(heads=3, layers=1, own=VOCABULARY)
    renamed = {prefix + key: tensor for key, tensor in found.items()}
    if name.endswith(".pt"):
        torch.save(renamed, tmp_path / name)
    else:
        save_file(renamed, tmp_path / name)
    published = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    (tmp_path / "config.json").write_text(json.dumps(published))
    heads = load_medusa(tmp_path, matrix)
    assert (heads.config.heads, heads.config.layers, heads.config.top_k) == (3, 1, 10)
    assert heads.tree(16).nodes == 16
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))
    output = [found[f"{i}.1.weight"] for i in range(3)]
    torch.testing.assert_close(logits(heads, hidden), reference(found, hidden, output, 3, 1))


def change(key: str, value: Any) -> Any:
    """An edit of a file's tensors: `value` None removes the key."""

    def edit(found: dict[str, Any]) -> dict[str, Any]:
        rest = {name: tensor for name, tensor in found.items() if name != key}
        return rest if value is None else rest | {key: value}

    return edit


BROKEN: dict[str, tuple[Any, str]] = {
    "unknown key": (change("0.0.linear.gain", torch.ones(2)), "unknown key '0.0.linear.gain'"),
    "unknown word": (change("norm", torch.ones(2)), "unknown key 'norm'"),
    "vocabulary layer of one head": (
        change("0.2.weight", torch.ones(260, 32)),
        "'1.2.weight' is m",
    ),
    "layer too deep": (change("0.5.weight", torch.ones(2, 2)), "unknown key '0.5.weight'"),
    "missing weight": (change("1.0.linear.weight", None), "key '1.0.linear.weight' is missing"),
    "missing bias": (change("1.1.linear.bias", None), "key '1.1.linear.bias' is missing"),
    "a lone head": (
        change("3.0.linear.bias", torch.ones(32)),
        "'2.0.linear.weight' is missing",
    ),
    "wrong width": (change("0.0.linear.weight", torch.ones(16, 32)), r"has shape \[16, 32\], exp"),
    "wrong rank": (change("0.1.linear.bias", torch.ones(1, 32)), r"'0.1.linear.bias' has shape"),
    "integers": (
        change("0.0.linear.bias", torch.ones(32, dtype=torch.int32)),
        "'0.0.linear.bias' is of type torch.int32",
    ),
    "float ids": (change("ids", torch.ones(3)), "'ids' must be a list of int32 or int64"),
    "empty ids": (change("ids", torch.ones(0, dtype=torch.int64)), "'ids' must be a list"),
    "ids out of range": (change("ids", torch.tensor([1, 260])), "'ids' reaches from 1 to 260"),
    "negative ids": (change("ids", torch.tensor([1, -1])), "'ids' reaches from -1 to 1"),
    "ids twice": (change("ids", torch.tensor([4, 9, 4])), "'ids' names a token twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors(target: Target, matrix: Any, tmp_path: Path, case: str) -> None:
    edit, message = BROKEN[case]
    save(tmp_path, edit(tensors()))
    with pytest.raises(ForerunError, match=message) as error:
        load_medusa(tmp_path, matrix)
    assert "\n" not in str(error.value) and WEIGHTS in str(error.value)


FACTS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "eagle"}, "kind is 'eagle'"),
    "heads": ({"heads": 5}, "heads is 5, but here it is 2"),
    "layers": ({"layers": 1}, "layers is 1, but here it is 2"),
    "hidden size": ({"hidden_size": 576}, "hidden_size is 576, but here it is 32"),
    "top_k of nothing": ({"top_k": 0}, "top_k is 0"),
    "top_k as text": ({"top_k": "2"}, "top_k is '2'"),
    "accuracy too short": ({"accuracy": [[0.5, 0.2]]}, "accuracy must hold 2 lists of 2"),
    "accuracy not a share": ({"accuracy": [[0.5, 0.2], [1.5, 0]]}, "accuracy must hold"),
    "accuracy not a number": ({"accuracy": [[0.5, float("nan")], [0, 0]]}, "accuracy must hold"),
    "accuracy as text": ({"accuracy": "high"}, "accuracy must hold"),
}


@pytest.mark.parametrize("case", FACTS)
def test_broken_facts(target: Target, matrix: Any, tmp_path: Path, case: str) -> None:
    facts, message = FACTS[case]
    save(tmp_path, tensors(), **facts)
    with pytest.raises(ForerunError, match=message):
        load_medusa(tmp_path, matrix)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00"])
def test_broken_json(target: Target, matrix: Any, tmp_path: Path, text: str) -> None:
    save(tmp_path, tensors())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ForerunError, match=r"config\.json"):
        load_medusa(tmp_path, matrix)


@pytest.mark.parametrize("kept", [0, 5, 200, -10])
def test_truncated_file(target: Target, matrix: Any, tmp_path: Path, kept: int) -> None:
    save(tmp_path, tensors())
    content = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content[:kept])
    with pytest.raises(ForerunError, match="damaged"):
        load_medusa(tmp_path, matrix)


class _Evil:
    def __reduce__(self) -> Any:
        return (Path("/tmp/forerun-was-here").touch, ())


@pytest.mark.parametrize("content", [pickle.dumps({"0.0.linear.weight": _Evil()}), b"", b"junk"])
def test_pickles_run_no_code(target: Target, matrix: Any, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(content)
    with pytest.raises(ForerunError, match=r"medusa_lm_head\.pt"):
        load_medusa(tmp_path, matrix)
    assert not Path("/tmp/forerun-was-here").exists()


def test_pickle_of_something_else(target: Target, matrix: Any, tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": 3}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ForerunError, match=r"'0\.0\.linear\.weight' is not a tensor"):
        load_medusa(tmp_path, matrix)
    torch.save([1, 2], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ForerunError, match="holds no tensors"):
        load_medusa(tmp_path, matrix)


def test_nothing_there(target: Target, matrix: Any, tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="no Medusa heads: expected one of"):
        load_medusa(tmp_path, matrix)


def test_saving_leaves_no_partial_file(tmp_path: Path) -> None:
    save(tmp_path, tensors())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", WEIGHTS]
    assert load_file(tmp_path / WEIGHTS).keys() == tensors().keys()
