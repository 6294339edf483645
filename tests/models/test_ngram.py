"""Prompt lookup against a search written as loops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.drafter import Committed
from forerun.models.ngram import NGram


def lookup(text: list[int], gamma: int, longest: int, shortest: int) -> list[int]:
    """What followed the latest earlier place with the longest matching suffix, wrapped."""
    best, length = -1, 0
    for place in range(len(text) - 1):
        same = 0
        while same < min(longest, place + 1) and text[place - same] == text[-1 - same]:
            same += 1
        if same and same >= length:
            best, length = place, same
    if length < shortest:
        return [-1] * gamma
    period = len(text) - 1 - best
    return [text[best + 1 + i % period] for i in range(gamma)]


def draft(drafter: NGram, text: list[int], slots: int = 64) -> list[int]:
    """The drafter's proposal after `text`, of which the last token was just committed."""
    count = len(text) - 1
    one = torch.ones(1)
    committed = Committed(
        tokens=torch.tensor([[*text, 9, 9]]),
        start=torch.tensor([0]),
        count=torch.tensor([count]),
        root=torch.tensor([text[-1]]),
        features=torch.zeros(1, count + 2, 0),
        hidden=torch.zeros(1, 4),
        uniforms=torch.zeros(1, 1, slots),
        temperature=one,
        top_k=torch.tensor([0]),
        top_p=one,
        branching=True,
    )
    vocabulary = torch.nn.Identity()  # prompt lookup reads tokens alone
    states = drafter.remember(committed, [torch.zeros(1, slots, dtype=torch.int64)], vocabulary)
    return drafter.draft(committed, states, vocabulary)[0].tolist()


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_matches_the_search(text, gamma, longest, shortest):
    shortest = min(shortest, longest)
    found = draft(NGram(gamma, longest, shortest), text)
    assert found == lookup(text, gamma, longest, shortest)


def test_a_short_period_is_continued_to_full_length():
    assert draft(NGram(6, 4, 2), [1, 2, 3, 8, 9, 8, 9]) == [8, 9, 8, 9, 8, 9]


def test_a_text_without_repetition_gives_no_proposal():
    assert draft(NGram(5, 4, 1), [1, 2, 3, 4]) == [-1] * 5
