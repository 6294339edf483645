"""The Python API: `forerun.runtime.load(bundle).generate("...")`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ForerunError
from forerun.runtime.bundle import Bundle, load_bundle
from forerun.runtime.chat import Messages, encode_prompt
from forerun.runtime.engine import GREEDY, Engine, Request, load_engine
from forerun.runtime.loop import Decoding, FinishReason, Stats, decode
from forerun.runtime.sampling import SamplingParams
from forerun.runtime.text import Detokenizer, StopStrings


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """Without the stop token; with the tokens of a stop string that ended the text."""
    finish_reason: FinishReason
    stats: Stats


class Stream(Iterator[str]):
    """An answer's text, piece by piece as it is decoded."""

    def __init__(self, model: Model, decoding: Decoding, stop: Sequence[str]) -> None:
        self._model, self._decoding = model, decoding
        self._detokenizer = Detokenizer(model.bundle.tokenizer)
        self._stops = StopStrings(stop)
        self._one_by_one = bool(stop)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._finish: FinishReason = "cancelled"
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer where it is; `completion` is then what there was."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """The whole answer: decodes what is left of it first."""
        for _ in self:
            pass
        return Completion(
            "".join(self._text), tuple(self._token_ids), self._finish, self._decoding.stats
        )

    def _run(self) -> Generator[str]:
        self._model.active = self
        try:
            for block in self._decoding:
                text, stopped = self._push(block.tokens)
                if block.finish and not stopped:
                    rest, stopped = self._stops.push(self._detokenizer.flush())
                    text += rest + self._stops.flush()
                if text:
                    self._text.append(text)
                if stopped or block.finish:
                    self._finish = "stop" if stopped else block.finish or "length"
                if text:
                    yield text
                if stopped:
                    return
                if self._model.active is not self:
                    raise ForerunError(
                        "another request began on this model: finish or close one before the next"
                    )
        finally:
            self._decoding.close()

    def _push(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """(text that can be shown now, whether a stop string ended it)."""
        text = ""
        # One by one where a stop string may end the answer inside a block: the tokens are then the
        # same whatever the blocks were.
        for part in [[token] for token in tokens] if self._one_by_one else [tokens]:
            self._token_ids += part
            new, stopped = self._stops.push(self._detokenizer.push(part))
            text += new
            if stopped:
                return text, True
        return text, False


class Model:
    """A loaded bundle. One request at a time."""

    def __init__(self, bundle: Bundle, engine: Engine) -> None:
        self.bundle, self.engine = bundle, engine
        self.active: Stream | None = None

    def generate(
        self,
        prompt: str | Messages,
        max_new_tokens: int = 256,
        params: SamplingParams = GREEDY,
        *,
        plain: bool = False,
        nodes: int | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """The answer to a text or to chat messages.

        `plain` switches speculation off, which changes the time but not the tokens; `nodes` picks
        one of the bundle's draft trees by its size; the text ends before any string of `stop`.
        Raises ForerunError for an empty prompt, one that is too long, and values out of range.
        """
        return self.stream(
            prompt, max_new_tokens, params, plain=plain, nodes=nodes, stop=stop
        ).completion

    def stream(
        self,
        prompt: str | Messages,
        max_new_tokens: int = 256,
        params: SamplingParams = GREEDY,
        *,
        plain: bool = False,
        nodes: int | None = None,
        stop: Sequence[str] = (),
    ) -> Stream:
        """As `generate`, but the text comes in pieces; then `completion` holds the whole."""
        ids = encode_prompt(self.bundle, prompt)
        return self.stream_ids(ids, max_new_tokens, params, self.tree_size(plain, nodes), stop)

    def stream_ids(
        self,
        ids: Sequence[int],
        max_new_tokens: int = 256,
        params: SamplingParams = GREEDY,
        nodes: int = 1,
        stop: Sequence[str] = (),
    ) -> Stream:
        """As `stream`, for a prompt of token ids and a tree of `nodes` nodes (1: plain)."""
        if max_new_tokens < 1:
            raise ForerunError(f"max_new_tokens is {max_new_tokens}: ask for at least one token")
        if isinstance(stop, str):
            stop = (stop,)
        request = Request(ids, len(ids) + max_new_tokens, params)
        stop_ids = self.bundle.manifest.target.stop_ids
        return Stream(self, decode(self.engine, request, nodes, stop_ids), stop)

    def tree_size(self, plain: bool = False, nodes: int | None = None) -> int:
        """The nodes of the tree to draft; raises ForerunError for one that the bundle lacks."""
        manifest = self.bundle.manifest
        if plain:
            return 1
        if nodes is None:
            return int(manifest.default_tree)
        if str(nodes) not in manifest.trees:
            sizes = ", ".join(sorted(manifest.trees, key=int))
            raise ForerunError(f"{self.bundle.path}: no tree of {nodes} nodes: it has {sizes}")
        return nodes


def load(path: str | Path, threads: int | None = None) -> Model:
    """The model in the bundle folder `path`, every file checked against its hash.

    `threads` bounds the CPU threads of an engine that runs there (None: all cores). Raises
    ForerunError where the bundle is damaged or this machine can't run its engine.
    """
    bundle = load_bundle(path)
    return Model(bundle, load_engine(bundle, threads))
