"""Exit codes of `ebbtide`, and the errors that carry them. A code never changes its meaning: scripts compare it.

With `-o json`, an error is a JSON object on the last line of stderr:

    {"error": {"code": "not-found", "exit_code": 4, "message": "...", "status": 404, "type": "urn:...", "errors": []}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from typer import TyperException

if TYPE_CHECKING:
    from ebbtide.client import ProblemError


class ExitCode(IntEnum):
    """Why a command ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    NOT_FOUND = 4
    UNAUTHENTICATED = 5
    UNAVAILABLE = 6

    @property
    def label(self) -> str:
        """The name of the code in JSON errors."""
        return self.name.lower().replace("_", "-")


MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "The command did what it was asked to do.",
    ExitCode.FAILED: "The input was valid, but the command failed. With `--wait`, the job did not succeed. `problems` "
    "listed a critical one.",
    ExitCode.USAGE: "An option, an argument, a file or a field of a document is invalid. A retry cannot help.",
    ExitCode.REFUSED: "Your roles or the current state do not allow the change (403, 409, 412).",
    ExitCode.NOT_FOUND: "The resource does not exist, or you may not see it (404, 410).",
    ExitCode.UNAUTHENTICATED: "The service accepts no such token. Run `ebbtide login` (401).",
    ExitCode.UNAVAILABLE: "The service or the database does not answer or is busy. Retry later (429, 502, 503, 504).",
}
_CODES_BY_STATUS = {
    400: ExitCode.USAGE,
    401: ExitCode.UNAUTHENTICATED,
    403: ExitCode.REFUSED,
    404: ExitCode.NOT_FOUND,
    409: ExitCode.REFUSED,
    410: ExitCode.NOT_FOUND,
    412: ExitCode.REFUSED,
    413: ExitCode.USAGE,
    415: ExitCode.USAGE,
    421: ExitCode.REFUSED,
    422: ExitCode.USAGE,
    429: ExitCode.UNAVAILABLE,
    502: ExitCode.UNAVAILABLE,
    503: ExitCode.UNAVAILABLE,
    504: ExitCode.UNAVAILABLE,
}


class CommandError(TyperException):
    """The input was valid, but the command failed."""

    exit_code = ExitCode.FAILED


class InputError(TyperException):
    """Invalid input. The message names the field, the value and the accepted values."""

    exit_code = ExitCode.USAGE


class RefusedError(CommandError):
    """The current state does not allow the change."""

    exit_code = ExitCode.REFUSED


class UnreachableError(CommandError):
    """A database does not respond now. A later attempt may succeed."""

    exit_code = ExitCode.UNAVAILABLE


class ServiceError(CommandError):
    """The service refused the request, or did not answer. `problem` is its answer."""

    def __init__(self, message: str, code: ExitCode, problem: ProblemError | None = None) -> None:
        super().__init__(message)
        self.exit_code = code
        self.problem = problem


def choose_exit_code(status: int) -> ExitCode:
    """Return the exit code for a problem with this HTTP status."""
    return _CODES_BY_STATUS.get(status, ExitCode.FAILED)


def wants_json(words: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON. It may be invalid, so its options are not parsed yet."""
    options = list(words[: words.index("--")] if "--" in words else words)
    given = [value for name, value in pairwise(options) if name in ("-o", "--output")]
    joined = {word.lower() for word in options} & {"-ojson", "--output=json"}
    return bool(joined) or any(value.lower() == "json" for value in given)


def format_error(error: TyperException, message: str) -> str:
    """Return the error as one line of JSON."""
    code = ExitCode(error.exit_code)
    document: dict[str, Any] = {"code": code.label, "exit_code": int(code), "message": message}
    problem = error.problem if isinstance(error, ServiceError) else None
    if problem is not None:
        fields = [{"field": each.field, "message": each.message} for each in problem.errors]
        document |= {"status": problem.status, "type": problem.type, "errors": fields}
    return json.dumps({"error": document}, ensure_ascii=False)
