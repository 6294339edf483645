"""ONNX Runtime GenAI: the int4 model that its own builder made."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import onnxruntime_genai as og

from .exchange import Generate, Job, Recorder


def open_model(job: Job) -> Generate:
    """The model folder, loaded; each answer has a generator of its own, as the library wants it."""
    config = og.Config(job.model)
    session = {"intra_op_num_threads": job.threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(config)

    def generate(prompt: Sequence[int], recorder: Recorder) -> None:
        params = og.GeneratorParams(model)
        params.set_search_options(
            do_sample=False, max_length=len(prompt) + recorder.max_new_tokens, batch_size=1
        )
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompt, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            if recorder.push([int(generator.get_next_tokens()[0])]):
                return

    return generate
