"""The field `framework` of a job, and what it requires of the job's other fields."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.documents.document import invalid_field
from scheduler.domain.suggestions import suggest
from scheduler.plan_export.frameworks import FRAMEWORKS
from scheduler.plan_export.placeholders import find_command_problem


def check_framework(framework: str, *, has_model: bool, has_lengths: bool, command: Sequence[str]) -> None:
    """Check that the framework is known, that there are plans for it, and that the command uses them.

    Raises:
        PydanticCustomError: a field is invalid.
    """
    if framework and framework not in FRAMEWORKS:
        raise invalid_field("framework", framework, f"one of {', '.join(FRAMEWORKS)}{suggest(framework, FRAMEWORKS)}")
    if framework and not has_model:
        raise invalid_field("framework", framework, "nothing without model or profile, from which plans are computed")
    if framework and has_lengths:
        raise invalid_field("framework", framework, "nothing with lengths; frameworks pad or pack to one length")
    if problem := find_command_problem(command, FRAMEWORKS.get(framework)):
        raise invalid_field("command", " ".join(command), problem)
