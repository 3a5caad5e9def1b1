"""Log lines in text and JSON format."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest

from scheduler.telemetry.logs import REQUEST_ID, configure_logging


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_line_has_message_and_traceback() -> None:
    stream = io.StringIO()
    configure_logging("INFO", "json", stream=stream)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("a.b").exception("it failed %d times", 3)
    line = json.loads(stream.getvalue())
    assert list(line) == ["at", "level", "logger", "message", "traceback"]
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "a.b", "it failed 3 times")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["at"])
    assert "RuntimeError: broken" in line["traceback"]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_lines_of_a_request_have_its_id(log_format: str) -> None:
    stream = io.StringIO()
    configure_logging("INFO", log_format, stream=stream)
    token = REQUEST_ID.set("r-1")
    logging.getLogger("a").info("inside")
    REQUEST_ID.reset(token)
    logging.getLogger("a").info("outside")
    inside, outside = stream.getvalue().splitlines()
    assert "r-1" in inside
    assert "r-1" not in outside


def test_text_line_starts_with_the_time_and_respects_the_level() -> None:
    stream = io.StringIO()
    configure_logging("WARNING", "text", stream=stream)
    logging.getLogger("a").info("not logged")
    logging.getLogger("a").warning("logged")
    [line] = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING a: logged", line)


@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
def test_requested_urls_are_not_logged_because_they_contain_secrets(level: str) -> None:
    stream = io.StringIO()
    configure_logging(level, "json", stream=stream)
    transport = httpx.MockTransport(lambda request: httpx.Response(200))
    with httpx.Client(transport=transport) as client:
        client.get("http://ebbtide:password@prometheus/api", params={"token": "password"})
    assert "password" not in stream.getvalue()


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml'"):
        configure_logging("INFO", "xml")
