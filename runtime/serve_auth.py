"""API keys: read from a file or the environment, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from forerun.errors import ForerunError

VARIABLE = "FORERUN_API_KEYS"
"""The environment's keys, separated by commas."""


class ApiKeys:
    """The keys that are let in; none: everybody is."""

    def __init__(self, keys: set[str]) -> None:
        self._digests = [_digest(key.encode()) for key in sorted(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, authorization: bytes | None) -> bool:
        """Whether the header `Authorization: Bearer KEY` has one of the keys."""
        if not self:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        # All of them are looked at, whichever fits: the time tells nothing about the keys.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(fits) and scheme.lower() == b"bearer"


def read_keys(path: Path | None) -> ApiKeys:
    """The keys in a file, one a line (# begins a comment), and those of the environment."""
    lines = os.environ.get(VARIABLE, "").split(",")
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ForerunError(f"{path}: can't read the API keys: {reason}") from None
        found = [line.partition("#")[0].strip() for line in text.splitlines()]
        if not any(found):
            raise ForerunError(f"{path}: no API key in it: write one a line")
        lines += found
    return ApiKeys({key.strip() for key in lines} - {""})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
