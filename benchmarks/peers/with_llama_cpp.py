"""llama.cpp through llama-cpp-python: the GGUF file as it is; `lookup`: tokens drafted a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from .exchange import Generate, Job, Recorder


class CountingLookup(LlamaPromptLookupDecoding):  # type: ignore[misc]
    """Prompt lookup that counts how often it was asked: once a step."""

    calls = 0

    def __call__(self, input_ids: Any, /, **options: Any) -> Any:
        self.calls += 1
        return super().__call__(np.asarray(input_ids), **options)


def open_model(job: Job) -> Generate:
    """The file, loaded with room for the longest prompt and its answer."""
    count = job.options.get("lookup")
    lookup = CountingLookup(num_pred_tokens=count) if count else None
    llm = Llama(
        job.model,
        n_ctx=job.slots + (count or 0) + 1,
        n_threads=job.threads,
        n_threads_batch=job.threads,
        draft_model=lookup,
        verbose=False,
    )

    def generate(prompt: Sequence[int], recorder: Recorder) -> None:
        llm.reset()  # a prompt's beginning that the one before it shares is read again
        calls = lookup.calls if lookup else 0
        for token in llm.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=False):
            if recorder.push([token]):
                break
        if lookup:
            recorder.steps = lookup.calls - calls

    return generate
