"""OpenVINO GenAI: the GGUF file as it is; `attention`: which backend; `lookup`: drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai as genai

from .exchange import Generate, Job, Recorder

NGRAM = 3
"""Longest n-gram that prompt lookup seeks, as in the library's own sample."""


class Streamer(genai.StreamerBase):  # type: ignore[misc]
    """Hands every token, or a step's tokens, to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def write(self, token: int | Sequence[int]) -> genai.StreamingStatus:
        tokens = [token] if isinstance(token, int) else list(token)
        done = self._recorder.push(tokens)
        return genai.StreamingStatus.STOP if done else genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is left over."""


def open_model(job: Job) -> Generate:
    """The file, loaded. Beginnings of prompts are not kept from one to the next."""
    attention, lookup = job.options["attention"], job.options.get("lookup")
    settings = {"ATTENTION_BACKEND": attention, "INFERENCE_NUM_THREADS": job.threads}
    if attention == "PA":
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        settings["scheduler_config"] = scheduler
    if lookup:
        settings["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(job.model, "CPU", **settings)

    def generate(prompt: Sequence[int], recorder: Recorder) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.stop_token_ids = recorder.max_new_tokens, set(job.stop_ids)
        config.do_sample = False
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = lookup, NGRAM
        pipeline.generate(openvino.Tensor(np.array([prompt], np.int64)), config, Streamer(recorder))

    return generate
