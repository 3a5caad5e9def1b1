"""How a command ends when it cannot do what was asked: one sentence on stderr and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from typer import TyperException

DONE = 0
FAILED = 1
BAD_INPUT = 2


class Failed(TyperException):
    """It was asked for properly and did not work."""

    exit_code = FAILED


class BadInput(TyperException):
    """Something that the user gave is wrong; the message names the field, the value and what is allowed."""

    exit_code = BAD_INPUT


def refuse(message: str) -> NoReturn:
    raise BadInput(message)


@contextmanager
def blaming(source: str) -> Iterator[None]:
    """Within it, every ValueError is the user's, made in `source` (a file or an option)."""
    try:
        yield
    except ValueError as mistake:
        raise BadInput(f"{source}: {mistake}" if source else str(mistake)) from mistake
