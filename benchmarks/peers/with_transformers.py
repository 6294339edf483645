"""transformers, eager, on the dequantised weights; `lookup`: tokens drafted a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from .exchange import Generate, Job, Recorder


class Streamer(BaseStreamer):  # type: ignore[misc]
    """Hands each step's tokens to the recorder; the prompt comes first and is left out."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._begun = recorder, False

    def put(self, value: Any) -> None:
        if self._begun:
            self._recorder.push(value.flatten().tolist())
        self._begun = True

    def end(self) -> None:
        """Nothing is left over."""


def open_model(job: Job) -> Generate:
    """The folder, loaded in the type that the options name, else float32."""
    torch.set_num_threads(job.threads)
    dtype = getattr(torch, job.options.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
    count = job.options.get("lookup")
    lookup = {"prompt_lookup_num_tokens": count} if count else {}

    def generate(prompt: Sequence[int], recorder: Recorder) -> None:
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=recorder.max_new_tokens,
            do_sample=False,
            eos_token_id=list(job.stop_ids),
            pad_token_id=job.stop_ids[0],
            streamer=Streamer(recorder),
            **lookup,
        )

    return generate
