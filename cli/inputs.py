"""How a command ends when it cannot do what was asked: one sentence on stderr and an exit code.

Files and options that a user gives, read so that every mistake is named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from typer import TyperException

from scheduler.domain.suggestions import suggest

if TYPE_CHECKING:
    from scheduler.solver.profiles.catalog import HardwareProfile


EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


class CommandError(TyperException):
    """It was asked for properly and did not work."""

    exit_code = EXIT_FAILED


class InputError(TyperException):
    """Something that the user gave is wrong; the message names the field, the value and what is allowed."""

    exit_code = EXIT_BAD_INPUT


def raise_input_error(message: str) -> NoReturn:
    raise InputError(message)


@contextmanager
def input_errors_from(source: str) -> Iterator[None]:
    """Within it, every ValueError is the user's, made in `source` (a file or an option)."""
    try:
        yield
    except ValueError as mistake:
        raise InputError(f"{source}: {mistake}" if source else str(mistake)) from mistake


STDIN = "-"


def read_text(source: str) -> str:
    """The text of a file, or of standard input for `-`. Raises BadInput for what cannot be read."""
    try:
        return sys.stdin.read() if source == STDIN else Path(source).read_text(encoding="utf-8")
    except OSError as wrong:
        raise InputError(f"{source}: cannot be read: {wrong.strerror or wrong}") from wrong
    except UnicodeDecodeError as wrong:
        raise InputError(f"{source}: is not UTF-8 text (byte {wrong.start})") from wrong


def read_json(source: str) -> Any:
    """The JSON of a file. Raises BadInput for malformed JSON, and for NaN and Infinity, which JSON does not have."""

    def not_json(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(read_text(source), parse_constant=not_json)
    except ValueError as wrong:
        raise InputError(f"{source}: is not JSON: {wrong}") from wrong
    except RecursionError as wrong:
        raise InputError(f"{source}: is not JSON of ours: it is nested too deeply") from wrong


def read_yaml_object(source: str) -> dict[str, Any]:
    """The one YAML (or JSON) object of a file. Raises BadInput for anything else."""
    document = read_yaml(source)
    if not isinstance(document, dict):
        raise_input_error(f"{source}: should hold one object (name: value lines), got {document!r:.60}")
    return document


def read_yaml(source: str) -> Any:
    """Whatever YAML (or JSON) value a file holds. Raises BadInput for anything else."""
    import yaml

    try:
        return yaml.safe_load(read_text(source))
    except (yaml.YAMLError, ValueError, RecursionError) as wrong:
        raise InputError(f"{source}: is not YAML: {' '.join(str(wrong).split())}") from wrong


def load_hardware(option: str, name: str) -> HardwareProfile:
    """The shipped profile of a GPU of this name, else the one in this file. Raises BadInput."""
    from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu, parse_gpu

    if name in list_gpu_names():
        return load_gpu(name)
    if name != STDIN and not Path(name).is_file():
        known = list_gpu_names()
        raise_input_error(
            f"{option}: {name!r} is neither a file nor one of the GPUs {', '.join(known)}{suggest(name, known)}"
        )
    with input_errors_from(f"{option} {name}"):
        return parse_gpu(read_text(name))


def parse_count(option: str, text: str, *, minimum: int = 1, maximum: int = 1_000_000) -> int:
    """A whole number from an option's text. Raises BadInput."""
    try:
        value = int(text)
    except ValueError:
        raise_input_error(f"{option}: {text!r} is not a whole number; allowed are {minimum} to {maximum}")
    if not minimum <= value <= maximum:
        raise_input_error(f"{option}: {value} is out of range; allowed are {minimum} to {maximum}")
    return value
