"""The Python API: `forerun.runtime.load(bundle).generate("...")`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from forerun.errors import ForerunError
from forerun.runtime.batch import Job, decode_batch
from forerun.runtime.bundle import Bundle, load_bundle
from forerun.runtime.chat import Messages, encode_prompt
from forerun.runtime.engine import GREEDY, Engine, Request, load_engine
from forerun.runtime.loop import Block, Decoding, FinishReason, Stats, decode
from forerun.runtime.pace import Fixed, Pace, Planned
from forerun.runtime.sampling import SamplingParams
from forerun.runtime.text import Detokenizer, StopStrings

Value = TypeVar("Value", int, SamplingParams)


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    """Without the stop token; with the tokens of a stop string that ended the text."""
    finish_reason: FinishReason
    stats: Stats
    blocks: tuple[Block, ...] = ()
    """Its tokens as they came: the prefill's, then a block a step."""


class Answer:
    """One answer's tokens and text, as its blocks come."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings((stop,) if isinstance(stop, str) else stop)
        self._one_by_one = bool(stop)
        self._token_ids: list[int] = []
        self._blocks: list[Block] = []
        self._text: list[str] = []
        self.finish: FinishReason | None = None
        """Why the answer is complete; None while it isn't."""

    def push(self, block: Block) -> str:
        """The text that the block settles."""
        self._blocks.append(block)
        text, stopped = self._push(block.tokens)
        if block.finish and not stopped:
            rest, stopped = self._stops.push(self._detokenizer.flush())
            text += rest + self._stops.flush()
        self.finish = "stop" if stopped else block.finish
        self._text.append(text)
        return text

    @property
    def tokens(self) -> int:
        """How many there are so far."""
        return len(self._token_ids)

    def completion(self, stats: Stats) -> Completion:
        """What there is."""
        finish = self.finish or "cancelled"
        ids = tuple(self._token_ids)
        return Completion("".join(self._text), ids, finish, stats, tuple(self._blocks))

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


class Stream(Iterator[str]):
    """An answer's text, piece by piece as it is decoded."""

    def __init__(self, model: Model, decoding: Decoding, stop: Sequence[str]) -> None:
        self._model, self._decoding = model, decoding
        self._answer = Answer(model.bundle.tokenizer, stop)
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
        return self._answer.completion(self._decoding.stats)

    def _run(self) -> Generator[str]:
        self._model.active = self
        try:
            for block in self._decoding:
                if text := self._answer.push(block):
                    yield text
                if self._answer.finish:
                    return
                if self._model.active is not self:
                    raise ForerunError(
                        "another request began on this model: finish or close one before the next"
                    )
        finally:
            self._decoding.close()


class Model:
    """A loaded bundle. One request at a time, or a list of them."""

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

    def generate_many(
        self,
        prompts: Sequence[str | Messages],
        max_new_tokens: int | Sequence[int] = 256,
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        plain: bool = False,
        nodes: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Completion | ForerunError]:
        """The answers to many prompts, as many at a time as the model was loaded with `rows`.

        Each is what `generate` gives alone. `max_new_tokens` and `params` are for all, or one a
        prompt. A prompt that can't be answered has its error instead, and the others are answered.
        """
        self.active = None  # a stream in its midst ends
        limits = _one_each(max_new_tokens, len(prompts), "max_new_tokens")
        every = _one_each(params, len(prompts), "params")
        answers = [Answer(self.bundle.tokenizer, stop) for _ in prompts]
        stop_ids = frozenset(self.bundle.manifest.target.stop_ids)
        results: dict[int, ForerunError] = {}
        places, jobs = [], []  # jobs[i] is prompt places[i]
        for place, prompt in enumerate(prompts):
            try:
                ids = encode_prompt(self.bundle, prompt)
                request = continuing(ids, limits[place], every[place])
            except ForerunError as error:
                results[place] = error
                continue
            places.append(place)
            jobs.append(Job(request, stop_ids))
        decoding = decode_batch(self.engine, jobs, self.pace(plain, nodes))
        for event in decoding:
            place = places[event.number]
            if isinstance(event.outcome, ForerunError):
                results[place] = event.outcome
                continue
            answers[place].push(event.outcome)
            if answers[place].finish:  # a stop string may have ended it before the engine did
                decoding.cancel(event.number)
        stats = {place: decoding.stats[number] for number, place in enumerate(places)}
        return [
            results[place] if place in results else answer.completion(stats[place])
            for place, answer in enumerate(answers)
        ]

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
        return self.stream_ids(ids, max_new_tokens, params, self.pace(plain, nodes), stop)

    def stream_ids(
        self,
        ids: Sequence[int],
        max_new_tokens: int = 256,
        params: SamplingParams = GREEDY,
        nodes: int | Pace = 1,
        stop: Sequence[str] = (),
    ) -> Stream:
        """As `stream`, for a prompt of token ids and a tree of so many nodes, or a pace."""
        request = continuing(ids, max_new_tokens, params)
        stop_ids = self.bundle.manifest.target.stop_ids
        return Stream(self, decode(self.engine, request, nodes, stop_ids), stop)

    def pace(self, plain: bool = False, nodes: int | None = None) -> Pace:
        """What is drafted: nothing, the tree of so many nodes, or what the bundle's plan says; one
        that was never tuned drafts its default tree. Raises ForerunError for a tree that it lacks.
        """
        manifest = self.bundle.manifest
        if plain:
            return Fixed(1)
        if nodes is None:
            return Planned(manifest.plan) if manifest.plan else Fixed(int(manifest.default_tree))
        if str(nodes) not in manifest.trees:
            sizes = ", ".join(sorted(manifest.trees, key=int))
            raise ForerunError(f"{self.bundle.path}: no tree of {nodes} nodes: it has {sizes}")
        return Fixed(nodes)


def load(path: str | Path, threads: int | None = None, rows: int = 1) -> Model:
    """The model in the bundle folder `path`, every file checked against its hash.

    `threads` bounds the CPU threads of an engine that runs there (None: all cores); `rows` is how
    many requests `generate_many` answers side by side. Raises ForerunError where the bundle is
    damaged or this machine can't run its engine.
    """
    bundle = load_bundle(path)
    return Model(bundle, load_engine(bundle, threads, rows))


def continuing(ids: Sequence[int], max_new_tokens: int, params: SamplingParams) -> Request:
    """The request for so many new tokens; raises ForerunError for none."""
    if max_new_tokens < 1:
        raise ForerunError(f"max_new_tokens is {max_new_tokens}: ask for at least one token")
    return Request(ids, len(ids) + max_new_tokens, params)


def _one_each(value: Value | Sequence[Value], count: int, name: str) -> Sequence[Value]:
    """`value` for each of `count` prompts, or the one value that all share."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ForerunError(f"{name} has {len(value)} values for {count} prompts: give one each")
    return value
