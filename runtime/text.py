"""Tokens -> text as it grows: incremental detokenising, and stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from forerun.errors import ForerunError

WINDOW = 8
"""Tokens kept as context: a token has at least one byte and a character at most four, so decoding
from any token on is in step with the characters, and past a stripped first space, well before."""


class Detokenizer:
    """Turns ids into text piece by piece; all pieces joined equal `tokenizer.decode` of all ids.

    The last few ids are decoded together with the new ones, and only what is new is returned, so a
    token's cost does not grow with the text. Held back until it can no longer change: a character
    whose bytes are not all there, and a run of byte tokens (`<0x..>`: one bad byte spoils the run).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, facts in added.items() if facts.special}
        decoder = tokenizer.decoder
        # Its pickled state is the decoder's JSON; the whole tokenizer's would take 0.1 s.
        self._has_byte_tokens = decoder is not None and b"ByteFallback" in decoder.__getstate__()
        self._reset()

    def _reset(self) -> None:
        self._window: list[int] = []
        self._bytes: list[int] = []
        self._emitted = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` settle; special tokens and unknown ids are skipped."""
        before = len(self._window)
        for token in ids:
            text = "" if token in self._special else self._tokenizer.id_to_token(token)
            if not text:
                continue
            if self._has_byte_tokens and _is_byte(text):
                self._bytes.append(token)
            else:
                self._window += [*self._bytes, token]
                self._bytes = []
        if len(self._window) == before:
            return ""
        settled = self._settled()
        new = settled[self._emitted :]
        self._emitted = len(settled)
        if len(self._window) > 2 * WINDOW:
            self._window = self._window[-WINDOW:]
            self._emitted = len(self._settled())
        return new

    def flush(self) -> str:
        """What was held back, as it stands; the next `push` starts a new text."""
        rest: str = self._tokenizer.decode(self._window + self._bytes)[self._emitted :]
        self._reset()
        return rest

    def _settled(self) -> str:
        # Bytes that may still become a character decode to exactly one U+FFFD, at the end.
        return str(self._tokenizer.decode(self._window)).removesuffix("\ufffd")


class StopStrings:
    """Watches a growing text for strings that end it, whatever pieces it comes in.

    The stop string that is complete first wins (of several complete at once, the longest); the text
    ends right before it. Raises ForerunError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ForerunError("a stop string is empty: every text contains it: leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be shown now, whether a stop string was met); after that, always ""."""
        if self._stopped:
            return "", True
        text = self._held + text
        starts = {stop: text.find(stop) for stop in self._stops}
        found = [(at + len(stop), at) for stop, at in starts.items() if at >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)[1]], True
        cut = len(text) - self._open(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _open(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = max(map(len, self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
