"""Logs: one line a record on standard error, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import TextIO

_TEXT_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the HTTP request that is being answered; empty outside of one."""


class TextFormatter(logging.Formatter):
    """A line for people; a request's ends with its id."""

    def format(self, record: logging.LogRecord) -> str:
        line, request_id = super().format(record), REQUEST_ID.get()
        return f"{line} [{request_id}]" if request_id else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: at, level, logger, message and, where there is one, request_id and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": f"{self.formatTime(record, _DATE_FORMAT)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, log_format: str, *, stream: TextIO | None = None) -> None:
    """Sends every logger of the process to `stream` (standard error), from `level` on.

    `form` is "text" or "json". Calling it again replaces the earlier set-up.
    """
    if log_format == "json":
        formatter: logging.Formatter = JsonFormatter()
    elif log_format == "text":
        formatter = TextFormatter(_TEXT_FORMAT, _DATE_FORMAT)
    else:
        raise ValueError(f"log format: got {log_format!r}; allowed: text, json")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # It tells each request with its whole URL: passwords of Prometheus and the secret paths of webhooks among them.
    logging.getLogger("httpx").setLevel(logging.WARNING)
