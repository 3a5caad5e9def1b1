"""Files and options that a user gives, read so that every mistake is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from scheduler.cli.failure import BadInput, blaming, refuse
from scheduler.domain.spelling import meant

if TYPE_CHECKING:
    from scheduler.solver.profiles.shipped import HardwareProfile

STDIN = "-"


def text_of(source: str) -> str:
    """The text of a file, or of standard input for `-`. Raises BadInput for what cannot be read."""
    try:
        return sys.stdin.read() if source == STDIN else Path(source).read_text(encoding="utf-8")
    except OSError as wrong:
        raise BadInput(f"{source}: cannot be read: {wrong.strerror or wrong}") from wrong
    except UnicodeDecodeError as wrong:
        raise BadInput(f"{source}: is not UTF-8 text (byte {wrong.start})") from wrong


def json_of(source: str) -> Any:
    """The JSON of a file. Raises BadInput for malformed JSON, and for NaN and Infinity, which JSON does not have."""

    def not_json(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(text_of(source), parse_constant=not_json)
    except ValueError as wrong:
        raise BadInput(f"{source}: is not JSON: {wrong}") from wrong
    except RecursionError as wrong:
        raise BadInput(f"{source}: is not JSON of ours: it is nested too deeply") from wrong


def yaml_of(source: str) -> dict[str, Any]:
    """The one YAML (or JSON) object of a file. Raises BadInput for anything else."""
    document = yaml_value_of(source)
    if not isinstance(document, dict):
        refuse(f"{source}: should hold one object (name: value lines), got {document!r:.60}")
    return document


def yaml_value_of(source: str) -> Any:
    """Whatever YAML (or JSON) value a file holds. Raises BadInput for anything else."""
    import yaml

    try:
        return yaml.safe_load(text_of(source))
    except (yaml.YAMLError, ValueError, RecursionError) as wrong:
        raise BadInput(f"{source}: is not YAML: {' '.join(str(wrong).split())}") from wrong


def hardware_of(option: str, name: str) -> HardwareProfile:
    """The shipped profile of a GPU of this name, else the one in this file. Raises BadInput."""
    from scheduler.solver.profiles.shipped import gpu_names, load_gpu, parse_gpu

    if name in gpu_names():
        return load_gpu(name)
    if name != STDIN and not Path(name).is_file():
        known = gpu_names()
        refuse(f"{option}: {name!r} is neither a file nor one of the GPUs {', '.join(known)}{meant(name, known)}")
    with blaming(f"{option} {name}"):
        return parse_gpu(text_of(name))


def count_of(option: str, text: str, *, least: int = 1, most: int = 1_000_000) -> int:
    """A whole number from an option's text. Raises BadInput."""
    try:
        value = int(text)
    except ValueError:
        refuse(f"{option}: {text!r} is not a whole number; allowed are {least} to {most}")
    if not least <= value <= most:
        refuse(f"{option}: {value} is out of range; allowed are {least} to {most}")
    return value
