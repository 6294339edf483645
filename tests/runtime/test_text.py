"""Text that grows token by token is the text of all tokens, and stop strings cut it exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from forerun.errors import ForerunError
from forerun.runtime.text import Detokenizer, StopStrings

TEXTS = [
    "Hello world! naïve café — 世界, Привет, नमस्ते.",
    "\U0001f600 \U0001f468‍\U0001f469‍\U0001f467 \U0001f389\U0001f389\U0001f3f3️‍\U0001f308",
    "  leading, and  double  spaces \n\n\tdef f(x):\n    return x ** 2  ",
    "<s>special</s> and <tool call>",
    "\ufffd genuine \ufffd\ufffd replacement \ufffd",
]


def pieces(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """What the detokeniser gives for `ids` in chunks of `sizes` (repeated)."""
    stream, given_out, at, turn = Detokenizer(tokenizer), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        given_out.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*given_out, stream.flush()]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_random_ids_in_random_chunks(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    # Few different ids make long runs: of byte tokens, of spaces, of halves of characters.
    size = tokenizer.get_vocab_size()
    pool = data.draw(st.lists(st.integers(0, size + 1), min_size=1, max_size=12))
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=80))
    assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_real_text_never_shows_half_a_character(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    text = data.draw(st.sampled_from(TEXTS[:4]) | st.text(max_size=40))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    given_out = pieces(tokenizer, ids, sizes)
    whole = tokenizer.decode(ids)
    assert "".join(given_out) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in given_out)


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(tokenizer, ids, [1])) == tokenizer.decode(ids)


def test_ordinary_text_is_shown_at_once(smollm2: tuple[Tokenizer, str]) -> None:
    tokenizer = smollm2[0]
    ids = tokenizer.encode("The quick brown fox, 12 of them.").ids
    assert pieces(tokenizer, ids, [1]) == [*(tokenizer.decode([token]) for token in ids), ""]


def test_an_emoji_appears_with_its_last_byte(smollm2: tuple[Tokenizer, str]) -> None:
    tokenizer = smollm2[0]
    ids = tokenizer.encode("\U0001f9ff").ids
    assert len(ids) > 1
    assert pieces(tokenizer, ids, [1]) == [*[""] * (len(ids) - 1), "\U0001f9ff", ""]


def test_half_a_character_at_the_end_is_flushed_and_the_stream_starts_anew(
    smollm2: tuple[Tokenizer, str],
) -> None:
    tokenizer = smollm2[0]
    ids = tokenizer.encode("a\U0001f9ff").ids[:-1]
    stream = Detokenizer(tokenizer)
    assert stream.push(ids) + stream.flush() == tokenizer.decode(ids) == "a\ufffd"
    assert stream.flush() == ""
    assert stream.push(tokenizer.encode("b").ids) == "b"


def test_special_and_unknown_ids_are_skipped(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    special = [i for i, facts in tokenizer.get_added_tokens_decoder().items() if facts.special]
    assert stream.push([special[0], 10**6]) + stream.flush() == ""


def test_special_tokens_push_no_text_out_of_the_context(tokenizer: Tokenizer) -> None:
    """A leading space is dropped at the start of the text only, however many specials follow it."""
    special = [i for i, facts in tokenizer.get_added_tokens_decoder().items() if facts.special]
    ids = tokenizer.encode(" hello hello", add_special_tokens=False).ids
    both = [*ids, *special[:1] * 50, *ids]
    assert "".join(pieces(tokenizer, both, [1])) == tokenizer.decode(both)


@pytest.mark.parametrize("unit", ["hello ", "\U0001f9ff", "\udcff"])
def test_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer, unit: str) -> None:
    """40 times the tokens take about 40 times as long: re-decoding all would take 1,600 times."""
    if unit == "\udcff":
        # The same half character for ever.
        ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False).ids[:1] * 20_000
    else:
        ids = tokenizer.encode(unit * 20_000, add_special_tokens=False).ids[:20_000]

    def seconds(count: int) -> float:
        stream, start = Detokenizer(tokenizer), time.perf_counter()
        for token in ids[:count]:
            stream.push([token])
        stream.flush()
        return time.perf_counter() - start

    few = min(seconds(len(ids) // 40) for _ in range(3))
    assert seconds(len(ids)) < 40 * 5 * few


def reference(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Where the first complete stop string ends a whole text: the shortest prefix that has one."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


SHORT = st.text("ab\n", min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(SHORT, max_size=4),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
)
def test_any_chunking_cuts_where_the_whole_text_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    watch, shown, stopped, at, turn = StopStrings(stops), "", False, 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        emit, stopped = watch.push(text[at : at + size])
        shown, at, turn = shown + emit, at + size, turn + 1
        # Nothing is shown that a stop string might still take back, nor held without need.
        expected, cut = reference(text[:at], stops)
        assert expected.startswith(shown) and stopped == cut
        held = expected[len(shown) :]
        assert stopped or held == "" or any(stop.startswith(held) for stop in stops)
    assert (shown + watch.flush(), stopped) == reference(text, stops)


@given(text=st.text("abc", max_size=30), stop=st.text("abc", min_size=1, max_size=4))
def test_one_stop_string_is_str_find(text: str, stop: str) -> None:
    watch = StopStrings([stop])
    shown = "".join(watch.push(character)[0] for character in text) + watch.flush()
    assert shown == (text[: text.find(stop)] if stop in text else text)


def test_nothing_comes_after_a_stop() -> None:
    watch = StopStrings(["END"])
    assert watch.push("one E") == ("one ", False)
    assert watch.push("ND two") == ("", True)
    assert watch.push("three") == ("", True)
    assert watch.flush() == ""


def test_no_stop_strings_hold_nothing_back_and_an_empty_one_is_refused() -> None:
    assert StopStrings([]).push("text") == ("text", False)
    with pytest.raises(ForerunError, match="empty"):
        StopStrings(["END", ""])
