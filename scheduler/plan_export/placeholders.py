"""Placeholders `{plan.NAME}` in the command of a job: what they may be, and how they are filled."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.suggestions import suggest
from scheduler.plan_export.framework import PLAN_FILE, ExportedPlan, Framework, list_plan_values

_PLACEHOLDER = re.compile(r"\{plan\.([^{}]*)\}")
PLAN_ARGS = "{plan.args}"


def find_placeholders(command: Sequence[str]) -> list[str]:
    """Return the names of the plan's placeholders in a command, in order."""
    return [name for word in command for name in _PLACEHOLDER.findall(word)]


def find_command_problem(command: Sequence[str], framework: Framework | None) -> str:
    """Return what a command must be instead, so that its script gets the plan; empty if it is right."""
    names = find_placeholders(command)
    if framework is None:
        return f"a command without {{plan.{names[0]}}}, or a job with framework" if names else ""
    accepted = framework.list_placeholders()
    unknown = next((name for name in names if name not in accepted), None)
    if unknown is not None:
        listed = ", ".join(f"{{plan.{name}}}" for name in accepted)
        return f"placeholders of {framework.name}, not {{plan.{unknown}}}: {listed}{suggest(unknown, accepted)}"
    if not names:
        wanted = PLAN_ARGS if framework.has_args else PLAN_FILE
        return f"a command that uses the plan of framework {framework.name}, for example with {wanted}"
    return ""


def fill_placeholders(command: Sequence[str], plan: ParallelPlan, exported: ExportedPlan, file: str) -> tuple[str, ...]:
    """Return the command with the plan filled in.

    A word that is `{plan.args}` becomes as many words as there are arguments. Inside a word, they are quoted for a
    shell.

    Args:
        file: path of the exported file, empty if there is none.

    Raises:
        ValueError: a placeholder has no value for this plan.
    """
    args = fill_args(exported.args, file)
    values = {**list_plan_values(plan), "file": file, "args": shlex.join(args)}
    return tuple(_fill_words(command, values, args))


def fill_args(args: Sequence[str], file: str) -> tuple[str, ...]:
    """Return exported arguments with the path of the exported file."""
    return tuple(word.replace(PLAN_FILE, file) for word in args)


def _fill_words(command: Sequence[str], values: Mapping[str, str], args: tuple[str, ...]) -> Iterator[str]:
    for word in command:
        if word == PLAN_ARGS:
            yield from args
            continue
        missing = next((name for name in _PLACEHOLDER.findall(word) if name not in values), None)
        if missing is not None:
            raise ValueError(f"command has {{plan.{missing}}}, for which this plan has no value.")
        yield _PLACEHOLDER.sub(lambda found: values[found[1]], word)
