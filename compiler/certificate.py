"""What `forerun verify` compares a bundle with, written while torch is at hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from forerun.compiler.eager import EagerStep
from forerun.models.checkpoint import Checkpoint
from forerun.models.step import Step
from forerun.models.target import Forward, Rows, Target
from forerun.runtime.bundle import Bundle
from forerun.runtime.chat import encode_prompt
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.prompts import Prompt

GOLDEN_FILE = "golden.safetensors"
REFERENCE_FILE = "reference.safetensors"
GOLDEN_TOKENS = 24
ANSWER_TOKENS = 32
TOP = 64


def write_golden(step: Step, prompt: Sequence[int], folder: Path) -> None:
    """`tokens` int64 `[n]` and the torch step's `logits` float32 `[n, V]` after each of them."""
    tokens = list(prompt[:GOLDEN_TOKENS])
    eager = EagerStep(step, 2 * len(tokens))
    outputs, _, _ = eager.run(eager.prefill_inputs(tokens, range(len(tokens))))
    save_file(
        {
            "tokens": np.asarray(tokens, np.int64),
            "logits": outputs.logits[0].to(torch.float32).numpy(),
        },
        folder / GOLDEN_FILE,
    )


def write_reference(
    checkpoint: Checkpoint, bundle: Bundle, prompts: Sequence[Prompt], folder: Path
) -> None:
    """The float32 target's opinion of the answers that the bundle gives to its own prompts.

    `tokens` int64 `[rows, n]` (prompt and answer, padded with 0), `start` and `length` int64
    `[rows]` (where the answer begins, where the row ends), and the float32 target's best 64 after
    each token: `ids` int32 and `logprobs` float32 `[rows, n, 64]`.
    """
    engine = load_engine(bundle)
    sequences, starts = [], []
    for prompt in prompts:
        ids = encode_prompt(bundle, prompt.content)
        answer = engine.prefill(Request(ids, len(ids) + ANSWER_TOKENS), 1)
        while committed := engine.step(1)[0]:
            answer += committed
        sequences.append([*ids, *answer])
        starts.append(len(ids))
    del engine
    width = max(map(len, sequences))
    target = Target(checkpoint.config, checkpoint.weights, width).eval()
    ids_out = np.zeros((len(sequences), width, TOP), np.int32)
    logprobs = np.full((len(sequences), width, TOP), -np.inf, np.float32)
    for row, sequence in enumerate(sequences):
        best = float32_logits(target, sequence).log_softmax(-1).topk(TOP)
        ids_out[row, : len(sequence)] = best.indices.numpy()
        logprobs[row, : len(sequence)] = best.values.numpy()
    save_file(
        {
            "tokens": np.stack([np.pad(s, (0, width - len(s))) for s in sequences]).astype(
                np.int64
            ),
            "start": np.asarray(starts, np.int64),
            "length": np.asarray([len(s) for s in sequences], np.int64),
            "ids": ids_out,
            "logprobs": logprobs,
        },
        folder / REFERENCE_FILE,
    )


def float32_logits(target: Target, tokens: Sequence[int]) -> Tensor:
    """`[n, V]`: the target's logits after each token of one sequence, in one forward."""
    with torch.no_grad():
        logits: Tensor = target.head(float32_forward(target, tokens).hidden)[0]
    return logits


@torch.no_grad()
def float32_forward(target: Target, tokens: Sequence[int], taps: Collection[int] = ()) -> Forward:
    """One sequence through the target, at once."""
    count, config = len(tokens), target.config
    places = torch.arange(count)
    mask = (places[:, None] >= places)[None]
    window = None
    if any(config.sliding_layers) and config.window is not None:
        window = mask & (places[:, None] - places < config.window)
    rows = Rows(
        positions=places[None],
        write_index=torch.zeros(1, dtype=torch.int64),
        pending=target.no_pending(1),
        mask=mask,
        window_mask=window,
    )
    caches = target.empty_caches(1, count)
    forward: Forward = target(torch.tensor([list(tokens)]), caches, rows, taps=taps)
    return forward
