"""This project: a bundle, plain with `nodes=1`, else as its plan or its default tree says."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.runtime.bundle import load_bundle
from forerun.runtime.engine import Request, load_engine
from forerun.runtime.loop import decode
from forerun.runtime.model import Model

from .exchange import Generate, Job, Recorder


def open_model(job: Job) -> Generate:
    """The bundle, loaded."""
    bundle = load_bundle(job.model)
    model = Model(bundle, load_engine(bundle, job.threads))
    pace = model.pace(nodes=job.options.get("nodes"))

    def generate(prompt: Sequence[int], recorder: Recorder) -> None:
        request = Request(prompt, len(prompt) + recorder.max_new_tokens)
        # A block is cut before a stop token: without stop ids here, the recorder sees it.
        for block in decode(model.engine, request, pace):
            if recorder.push(block.tokens):
                return

    return generate
