"""Logging setup: one line per record on standard error, as text or as JSON."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar
from typing import TextIO

from pythonjsonlogger.json import JsonFormatter

_TEXT_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
_JSON_FIELDS = {
    "asctime": "at",
    "levelname": "level",
    "name": "logger",
    "message": "message",
    "request_id": "request_id",
    "exc_info": "traceback",
}
ACCESS_LOGGER = "ebbtide.access"
"""Logger of the access log, whose records are JSON objects under every log format and level."""
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that is being handled; empty outside of requests."""


class UtcTextFormatter(logging.Formatter):
    """Text lines with UTC times. The id of the request, if any, is appended in brackets."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        line, request_id = super().format(record), REQUEST_ID.get()
        return f"{line} [{request_id}]" if request_id else line


class UtcJsonFormatter(JsonFormatter):
    """JSON objects with the keys at, level, logger, message and, where they apply, request_id and traceback."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        if request_id := REQUEST_ID.get():
            record.request_id = request_id
        return super().format(record)


def configure_logging(level: str, log_format: str, *, stream: TextIO | None = None) -> None:
    """Send all loggers of the process to one stream, replacing any earlier setup.

    Args:
        level: the lowest level that is logged.
        log_format: "text" or "json".
        stream: standard error by default.
    """
    if log_format == "json":
        formatter: logging.Formatter = UtcJsonFormatter(
            ["asctime", "levelname", "name", "message"], rename_fields=_JSON_FIELDS
        )
        formatter.default_time_format = _DATE_FORMAT
    elif log_format == "text":
        formatter = UtcTextFormatter(_TEXT_FORMAT, _DATE_FORMAT)
    else:
        raise ValueError(f"log format is {log_format!r}. Set it to text or json")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    access_handler, access = logging.StreamHandler(stream or sys.stderr), logging.getLogger(ACCESS_LOGGER)
    access_handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers, access.propagate = [access_handler], False
    access.setLevel(logging.INFO)
    # At INFO, httpx logs each URL, and URLs contain passwords of Prometheus and secret paths of webhooks.
    logging.getLogger("httpx").setLevel(logging.WARNING)
