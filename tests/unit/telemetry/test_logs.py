"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from scheduler.telemetry.logs import configure_logging


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_hold_the_message_and_the_traceback() -> None:
    stream = io.StringIO()
    configure_logging("INFO", "json", stream=stream)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("a.b").exception("it failed %d times", 3)
    line = json.loads(stream.getvalue())
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "a.b", "it failed 3 times")
    assert line["at"].endswith("Z")
    assert "RuntimeError: broken" in line["traceback"]


def test_text_lines_begin_with_the_time_and_respect_the_level() -> None:
    stream = io.StringIO()
    configure_logging("WARNING", "text", stream=stream)
    logging.getLogger("a").info("not this")
    logging.getLogger("a").warning("but this")
    [line] = stream.getvalue().splitlines()
    assert line.endswith("WARNING a: but this")


@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
def test_no_url_that_is_asked_is_logged_because_urls_hold_secrets(level: str) -> None:
    stream = io.StringIO()
    configure_logging(level, "json", stream=stream)
    answers = httpx.MockTransport(lambda request: httpx.Response(200))
    with httpx.Client(transport=answers) as client:
        client.get("http://ebbtide:password@prometheus/api", params={"token": "password"})
    assert "password" not in stream.getvalue()


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: text, json"):
        configure_logging("INFO", "xml")
