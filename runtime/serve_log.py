"""Logs as JSON lines, and served prompts as a file that `forerun synthesize` reads."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.runtime.chat import Messages

LOG = logging.getLogger("forerun.serve")
CAPTURE_BYTES = 1 << 30
"""A file of captured prompts grows no longer than this."""


class JsonLines(logging.Formatter):
    """One JSON object a record; what is given as `extra={"facts": {...}}` is part of it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Have the server's own records, and uvicorn's, written to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("forerun.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def say(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with its facts."""
    LOG.log(level, event, extra={"facts": facts})


class Capture:
    """Prompts, appended to a file as they are answered. Its owner alone may read it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ForerunError(f"{path}: can't capture prompts: {error.strerror}") from None
        self._room = CAPTURE_BYTES - os.fstat(self._file).st_size
        self._full = False

    def write(self, prompt: str | Messages) -> None:
        """Append a prompt. A disk that is full costs no request."""
        key = "prompt" if isinstance(prompt, str) else "messages"
        line = json.dumps({key: prompt, "category": "served"}, ensure_ascii=False) + "\n"
        data = line.encode("utf-8", "replace")
        with self._lock:
            if self._full:
                return
            try:
                if len(data) > self._room:
                    raise OSError(0, f"it has {CAPTURE_BYTES} bytes")
                os.write(self._file, data)
                self._room -= len(data)
            except OSError as error:
                self._full = True
                say("capturing ended", logging.ERROR, file=str(self._path), reason=error.strerror)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
