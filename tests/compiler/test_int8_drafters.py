"""int8 steps of drafters that share the target's ends, whose weights are rotated there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from forerun.compiler.options import CompileOptions  # noqa: E402
from forerun.compiler.pipeline import compile_bundle  # noqa: E402
from forerun.models.checkpoint import load_checkpoint  # noqa: E402
from forerun.models.dflash import DFlashConfig  # noqa: E402
from forerun.models.dflash_folder import dflash_shapes, save_dflash  # noqa: E402
from forerun.models.draft_layer import DraftLayerConfig  # noqa: E402
from forerun.runtime.bundle import load_bundle  # noqa: E402
from forerun.runtime.engine import Request, load_engine  # noqa: E402
from forerun.runtime.loop import decode  # noqa: E402
from forerun.runtime.sampling import SamplingParams  # noqa: E402
from forerun.training.eagle import EagleTraining, start, write  # noqa: E402
from forerun.training.fit import Settings  # noqa: E402

PARAMS = (SamplingParams(), SamplingParams(1.0, top_p=0.9, seed=3))


def one_layer(kind: str, folder: Path, checkpoint: Any) -> None:
    """A layer of the target's own, as training starts from."""
    ids = torch.arange(checkpoint.config.vocab_size)
    training = EagleTraining(kind=kind, draft_vocabulary=len(ids))
    drafter, _ = start(checkpoint, training, ids, 256)
    write(folder, checkpoint, drafter, ids, training, Settings())


def dflash(folder: Path, checkpoint: Any) -> None:
    target = checkpoint.config
    layer = DraftLayerConfig(target.hidden_size, 48, 6, 2, 8, 1e-5, 2048, target.rope)
    config = DFlashConfig(
        layer=layer, num_layers=1, block_size=4, mask_token_id=3, feature_layers=(0, 1, 2)
    )
    draw = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(*shape, generator=draw) * 0.2 + ("norm" in name)
        for name, shape in dflash_shapes(config)
    }
    save_dflash(folder, config, weights, {})


@pytest.mark.slow  # exports
@pytest.mark.parametrize("kind", ["mtp", "eagle", "dflash", "mtp+ngram"])
def test_a_drafter_that_shares_the_targets_ends_stays_lossless_under_int8(
    tmp_path: Path, tiny_checkpoint_folder: Path, kind: str
) -> None:
    checkpoint = load_checkpoint(tiny_checkpoint_folder)
    name = kind.removesuffix("+ngram")
    if name == "dflash":
        dflash(tmp_path / name, checkpoint)
    else:
        one_layer(name, tmp_path / name, checkpoint)
    options = CompileOptions(
        target=str(tiny_checkpoint_folder),
        output=tmp_path / "bundle",
        drafter=str(tmp_path / kind),
        capacity=512,
        trees=(4,),
    )
    bundle = load_bundle(compile_bundle(options).path)
    assert bundle.manifest.precision == "int8"
    engine = load_engine(bundle, threads=1)
    prompt = [(7 * i) % 11 + 60 for i in range(30)]
    for params in PARAMS:
        runs = [
            [t for block in decode(engine, Request(prompt, 90, params), n) for t in block.tokens]
            for n in (1, 4)
        ]
        assert runs[0] == runs[1]
        assert len(runs[0]) == 60
