"""Several ways to decode measured against each other, prompt by prompt, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from forerun.runtime.bench import ratio_interval
from forerun.runtime.loop import Stats
from forerun.runtime.model import Completion, Model
from forerun.runtime.pace import Pace
from forerun.runtime.tree import Tree


@dataclass(frozen=True)
class Runner:
    """One way to decode."""

    pace: Pace
    trees: Mapping[str, Tree | None]
    """The shapes of the engine's trees meanwhile."""


@dataclass(frozen=True)
class Result:
    """What all runners took for the same prompts."""

    answers: Mapping[str, Sequence[Completion]]

    def stats(self, name: str) -> Stats:
        """Of one runner, all prompts together."""
        return reduce(add, (answer.stats for answer in self.answers[name]), Stats())

    def ratio(self, name: str, base: str) -> tuple[float, list[float] | None]:
        """How much faster `name` is than `base`, and the 95% bootstrap interval over prompts."""
        slow, fast = self.stats(base).tokens_per_s, self.stats(name).tokens_per_s
        interval = ratio_interval(
            [answer.stats for answer in self.answers[base]],
            [answer.stats for answer in self.answers[name]],
        )
        return fast / slow if slow else 0.0, interval

    def identical(self, name: str, base: str) -> int:
        """Prompts to which both give the same tokens."""
        pairs = zip(self.answers[name], self.answers[base], strict=True)
        return sum(one.token_ids == other.token_ids for one, other in pairs)


def race(
    model: Model,
    prompts: Sequence[Sequence[int]],
    runners: Mapping[str, Runner],
    max_new_tokens: int,
    advance: Callable[[], object] = lambda: None,
) -> Result:
    """Every prompt (token ids) answered greedily by each runner; who begins alternates."""
    names = [*runners]
    answers: dict[str, list[Completion]] = {name: [] for name in names}

    def run(name: str, ids: Sequence[int], tokens: int) -> Completion:
        model.engine.take_trees(runners[name].trees)
        return model.stream_ids(ids, tokens, nodes=runners[name].pace).completion

    for name in names:  # the first run of anything pays for its set-up
        run(name, prompts[0], min(16, max_new_tokens))
    for number, ids in enumerate(prompts):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            answers[name].append(run(name, ids, max_new_tokens))
        advance()
    return Result(answers)
