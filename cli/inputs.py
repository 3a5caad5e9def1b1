"""Readers of files and options that report invalid input by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from cli.exit_codes import InputError
from scheduler.domain.suggestions import suggest

if TYPE_CHECKING:
    from yaml import MarkedYAMLError

    from scheduler.solver.profiles.catalog import HardwareProfile


def raise_input_error(message: str) -> NoReturn:
    raise InputError(message)


@contextmanager
def input_errors_from(source: str) -> Iterator[None]:
    """Turn each ValueError of the block into an InputError that names `source`, a file or an option."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{source}: {error}" if source else str(error)) from error


def has_no_subcommand(context: typer.Context) -> bool:
    """Return whether a command group was called without a subcommand, which lists its resources.

    Raises:
        InputError: an option stands before the subcommand, where it would be ignored.
    """
    if context.invoked_subcommand is None:
        return True
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise_input_error(
                f"--{name} must follow the subcommand: {context.command_path} {context.invoked_subcommand} --{name} ..."
            )
    return False


STDIN = "-"


def read_text(source: str) -> str:
    """Return the text of a file, or of standard input for `-`. Raises InputError if it cannot be read."""
    try:
        return sys.stdin.read() if source == STDIN else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: is not UTF-8 text (byte {error.start})") from error


def read_json(source: str) -> Any:
    """Return the JSON value in a file. Raises InputError for malformed JSON and for NaN and Infinity."""

    def reject_constant(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(read_text(source), parse_constant=reject_constant)
    except ValueError as error:
        raise InputError(f"{source}: is not JSON: {error}") from error
    except RecursionError as error:
        raise InputError(f"{source}: the JSON is nested too deeply") from error


def read_yaml_object(source: str) -> dict[str, Any]:
    """Return the YAML or JSON object in a file. Raises InputError for anything else."""
    document = read_yaml(source)
    if not isinstance(document, dict):
        raise_input_error(f"{source}: must contain one object (`name: value` lines), got {document!r:.60}")
    return document


def read_yaml(source: str) -> Any:
    """Return the YAML or JSON value in a file. Raises InputError if the file is not YAML."""
    import yaml

    try:
        return yaml.safe_load(read_text(source))
    except yaml.MarkedYAMLError as error:
        raise InputError(_format_yaml_error(source, error)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{source}: is not YAML: {' '.join(str(error).split())}") from error


def _format_yaml_error(source: str, error: MarkedYAMLError) -> str:
    """Return the error with its place first: `job.yaml line 3, column 7: is not YAML: ...`."""
    mark = error.problem_mark or error.context_mark
    place = source if mark is None else f"{source} line {mark.line + 1}, column {mark.column + 1}"
    why = ", ".join(part for part in (error.context, error.problem, error.note) if part)
    return f"{place}: is not YAML: {' '.join(why.split())}"


def read_env_file(source: str) -> dict[str, str]:
    """Return the variables of a file with NAME=VALUE lines, comments and quoted values.

    Values are literal: `$NAME` and `${NAME}` are not replaced.

    Raises:
        InputError: the file cannot be read, or a line has another form.
    """
    from io import StringIO

    from dotenv.parser import parse_stream  # dotenv_values would skip invalid lines and replace ${NAME}

    variables: dict[str, str] = {}
    for binding in parse_stream(StringIO(read_text(source))):
        if binding.error or (binding.key is not None and binding.value is None):
            line, text = binding.original.line, binding.original.string.strip()
            raise_input_error(f"{source}: line {line}: {text!r:.60} must have the form NAME=VALUE, with closed quotes")
        if binding.key is not None and binding.value is not None:
            variables[binding.key] = binding.value
    return variables


def parse_label(option: str, item: str) -> tuple[str, str]:
    """Return the key and the value of a label. Raises InputError if the text has no `=`."""
    key, sign, value = item.partition("=")
    if not sign or not key:
        raise_input_error(f"{option}: {item!r} must have the form KEY=VALUE, such as team=vision")
    return key, value


def load_hardware(option: str, name: str) -> HardwareProfile:
    """Return the GPU profile that ships under this name, else the profile in the file `name`.

    Raises:
        InputError: there is neither a shipped profile nor a valid file of this name.
    """
    from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu, parse_gpu

    if name in list_gpu_names():
        return load_gpu(name)
    if name != STDIN and not Path(name).is_file():
        known = list_gpu_names()
        raise_input_error(
            f"{option}: {name!r} is neither a file nor a known GPU ({', '.join(known)}){suggest(name, known)}"
        )
    with input_errors_from(f"{option} {name}"):
        return parse_gpu(read_text(name))


def parse_gpu_indices(option: str, text: str) -> list[int]:
    """Return the GPU indices in an option's text such as `4-7` or `0,2`, ascending; none for `all`.

    Raises:
        InputError: the text has another form.
    """
    if text.strip() == "all":
        return []
    indices = set[int]()
    for part in text.split(","):
        first, _, last = (bound.strip() for bound in part.partition("-"))
        bounds = [first, last or first]
        if not all(bound.isascii() and bound.isdigit() and len(bound) <= 4 for bound in bounds):
            raise_input_error(f"{option}: {text!r} is no list of GPU indices. Use indices such as 4-7 or 0,2, or all.")
        low, high = map(int, bounds)
        if low > high:
            raise_input_error(f"{option}: {part!r} is empty. Use A-B with A not above B.")
        indices.update(range(low, high + 1))
    return sorted(indices)


def parse_count(option: str, text: str, *, minimum: int = 1, maximum: int = 1_000_000) -> int:
    """Return the integer in an option's text. Raises InputError if it is not from `minimum` to `maximum`."""
    try:
        value = int(text)
    except ValueError:
        raise_input_error(f"{option}: {text!r} is not an integer. Use a value from {minimum} to {maximum}.")
    if not minimum <= value <= maximum:
        raise_input_error(f"{option}: {value} is out of range. Use a value from {minimum} to {maximum}.")
    return value
