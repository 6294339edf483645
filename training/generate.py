"""Batched answers by the target: rows that finish make room for waiting prompts at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.models.target import Caches, Target
from forerun.runtime.sampling import uniforms
from forerun.training.device import CPU, moved
from forerun.training.read import forward, read_alike, tensors_of

SLOT_STEP = 32
"""Cache slots that a step looks at are rounded up to a multiple of this."""
RESCORED = 8
"""Candidates of a greedy choice whose scores are computed again in float32."""


@dataclass(frozen=True)
class Request:
    """One prompt to answer."""

    index: int
    prompt: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class GenerateConfig:
    """How answers are made: their end, and how many rows run side by side."""

    stop_ids: tuple[int, ...]
    max_new_tokens: int
    batch: int = 96
    refill: int = 8
    """Waiting prompts are admitted once this many rows are free: a prefill needs company."""
    top: int = 0
    """How many of the likeliest tokens are kept at every place of an answer."""


@dataclass(frozen=True)
class Top:
    """The likeliest tokens, best first, and their log-probabilities at temperature 1."""

    ids: Tensor  # [n, K] int32
    logprobs: Tensor  # [n, K] float16: within 0.0005 relative, or 0.004 down to -16


@dataclass
class _Row:
    request: Request
    answer: list[int]
    states: list[Tensor]  # [H] each
    draws: list[float]
    tops: list[Top]  # [K] each

    @property
    def cached(self) -> int:
        """Tokens before the newest one."""
        return len(self.request.prompt) + len(self.answer) - 1


@dataclass(frozen=True)
class Answer:
    """What the target said to one request."""

    request: Request
    tokens: list[int]
    """The stop token included."""
    states: Tensor
    """`[tokens, H]` on the CPU: the normed hidden state that chose each token."""
    top: Top | None = None


def generate(
    target: Target,
    requests: Iterable[Request],
    config: GenerateConfig,
    follow: Callable[[Answer], Request | None] = lambda answer: None,
) -> Iterator[Answer]:
    """Yields every request's answer as it finishes; what `follow` makes of it joins the queue.

    A sampled answer depends on its own seed alone, never on the company it was decoded in (but
    for rounding). A prompt and its answer must fit the target's capacity.
    """
    waiting = deque(requests)
    batch = _Batch(target, config, min(config.batch, len(waiting)))
    with torch.inference_mode():
        while waiting or batch.live:
            room = len(batch.free)
            if waiting and (room >= min(config.refill, len(waiting)) or not batch.live):
                group = [waiting.popleft() for _ in range(min(room, config.refill, len(waiting)))]
                finished = batch.admit(group)
            else:
                finished = batch.step()
            for answer in finished:
                following = follow(answer)
                waiting += [] if following is None else [following]
                yield answer
            if not waiting:
                batch.shrink()


class _Batch:
    """The rows being decoded, and their caches."""

    def __init__(self, target: Target, config: GenerateConfig, size: int) -> None:
        self.target, self.config = target, config
        self.device = target.cos.device
        self.rows: list[_Row | None] = [None] * size
        self.length = self._row([0] * size)  # [B] cached tokens
        self.last = self._row([0] * size)  # [B] the newest token, not cached yet
        self.caches = target.empty_caches(size, target.capacity)

    @property
    def live(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if row is not None]

    @property
    def free(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if row is None]

    def admit(self, group: Sequence[Request]) -> Iterator[Answer]:
        """Reads the prompts of `group` and chooses their first tokens.

        What all of them start with is read once.
        """
        free = self.free[: len(group)]
        places = self._row(free)
        prompts = [request.prompt for request in group]
        read = read_alike(self.target, prompts)
        longest = max(map(len, prompts))
        for ours, theirs in zip(tensors_of(self.caches), tensors_of(read.caches), strict=True):
            ours[places, :, :longest] = theirs
        length = self._row([len(prompt) for prompt in prompts])
        self.length[places] = length
        for place, request in zip(free, group, strict=True):
            table = uniforms(request.seed, self.config.max_new_tokens)
            self.rows[place] = _Row(request, [], [], table.tolist(), [])
        row = self._row([*range(len(group))])
        yield from self._choose(free, read.rest.hidden[row, length - read.shared - 1])

    def step(self) -> Iterator[Answer]:
        """One token for every row; idle rows come along and are ignored."""
        live = self.live
        used = max(row.cached for row in self.rows if row is not None) + 1
        used = min(-(-used // SLOT_STEP) * SLOT_STEP, self.target.capacity)
        view = Caches(*([t[:, :, :used] for t in part] for part in _parts(self.caches)))
        self.length.clamp_(max=used - 1)  # only an idle row's can lie above
        hidden = forward(self.target, self.last[:, None], self.length, view).hidden
        places = self._row(live)
        self.length[places] += 1
        yield from self._choose(live, hidden[places, 0])

    def shrink(self) -> None:
        """Lets go of the idle rows once they are half of all: nobody will take them."""
        live = self.live
        if len(live) <= len(self.rows) // 2:
            self.rows, places = [self.rows[place] for place in live], self._row(live)
            self.length, self.last = self.length[places], self.last[places]
            self.caches = Caches(*([t[places] for t in part] for part in _parts(self.caches)))

    def _row(self, values: list[int]) -> Tensor:
        """`values` on the target's device."""
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def _choose(self, places: list[int], hidden: Tensor) -> Iterator[Answer]:
        """The next token of the rows at `places` from `hidden` `[n, H]`; yields finished rows."""
        rows = [row for place in places if (row := self.rows[place]) is not None]
        temperature = torch.tensor([row.request.temperature for row in rows])
        draws = torch.tensor([row.draws[len(row.answer)] for row in rows])
        logits = self.target.head(hidden)  # [n, V]
        chosen = choose(self.target.head, hidden, logits, temperature, draws)
        self.last[self._row(places)] = chosen
        if self.config.top:
            top = likeliest(self.target.head, hidden, logits, self.config.top)
            for row, ids, logprobs in zip(rows, top.ids, top.logprobs, strict=True):
                row.tops.append(Top(ids, logprobs))
        for place, row, token, state in zip(places, rows, chosen.tolist(), hidden, strict=True):
            row.answer.append(token)
            row.states.append(state)
            if token in self.config.stop_ids or len(row.answer) == self.config.max_new_tokens:
                self.rows[place] = None
                felt = moved((torch.stack(row.states), _stacked(row.tops)), CPU)
                yield Answer(row.request, row.answer, *felt)


def choose(
    head: nn.Module, hidden: Tensor, logits: Tensor, temperature: Tensor, draws: Tensor
) -> Tensor:
    """One token a row `[n]`: the likeliest at temperature 0, else drawn by the inverse CDF.

    `logits` `[n, V]` are the `head`'s of `hidden` `[n, H]`; `temperature` and `draws` `[n]` lie on
    the CPU. In bfloat16 logits tie often, so the best few are scored again in float32.
    """
    if logits.dtype == torch.float32:
        chosen = logits.argmax(-1)
    else:
        best, scores = _rescored(head, hidden, logits, RESCORED)
        chosen = best.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
    sampled = (temperature > 0).nonzero()[:, 0]
    if len(sampled):
        heat, draw = moved((temperature[sampled, None], draws[sampled, None]), logits.device)
        rows = sampled.to(logits.device)
        cdf = (logits[rows].to(torch.float32) / heat).softmax(-1).cumsum(-1)
        chosen[rows] = torch.searchsorted(cdf, draw * cdf[:, -1:], right=True)[:, 0]
    assert isinstance(chosen, Tensor)
    return chosen


def likeliest(head: nn.Module, hidden: Tensor, logits: Tensor, count: int) -> Top:
    """The `count` best tokens of each row, from a float32 log-softmax; arguments as `choose`'s.

    The best of bfloat16 logits are scored again in float32, a few more than are kept.
    """
    wide = logits.to(torch.float32)
    if logits.dtype != torch.float32:
        extra = min(count + RESCORED, wide.shape[1])
        wide.scatter_(1, *_rescored(head, hidden, logits, extra))
    best = wide.log_softmax(-1).topk(count, dim=-1)
    return Top(best.indices.to(torch.int32), best.values.to(torch.float16))


def _rescored(head: nn.Module, hidden: Tensor, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row by `logits`, and their scores in float32 `[n, count]`."""
    best = logits.topk(count, dim=-1).indices
    columns = vocabulary_rows(head, best).to(torch.float32)  # [n, count, H]
    return best, (columns @ hidden.to(torch.float32)[..., None])[..., 0]


def _stacked(tops: Sequence[Top]) -> Top | None:
    """The places of one answer as `[n, K]`."""
    if not tops:
        return None
    return Top(torch.stack([top.ids for top in tops]), torch.stack([top.logprobs for top in tops]))


def vocabulary_rows(head: nn.Module, ids: Tensor) -> Tensor:
    """The output vectors `[..., H]` of the tokens `ids`, whether the head is tied or not."""
    embed = getattr(head, "embed", None)
    weight = head.get_parameter("weight").T if embed is None else embed.weight
    assert isinstance(weight, Tensor)
    return weight[ids]


def _parts(caches: Caches) -> tuple[list[Tensor], list[Tensor]]:
    return caches.keys, caches.values
