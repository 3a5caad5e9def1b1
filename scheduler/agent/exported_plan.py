"""The plan of a run in the words of its training framework."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.domain.run_document import RunDocument
from scheduler.plan_export.framework import ExportedPlan
from scheduler.plan_export.frameworks import find_framework
from scheduler.plan_export.placeholders import fill_placeholders


def export_run_plan(document: RunDocument) -> ExportedPlan | None:
    """Return the run's plan as its framework reads it, None for a job without `framework`.

    Raises:
        ValueError: this agent does not know the framework, or the framework cannot express the plan.
    """
    if not document.framework:
        return None
    try:
        framework = find_framework(document.framework)
    except ValueError as error:
        raise ValueError(f"framework: {error}. Use an agent of the control plane's version.") from None
    if document.plan is None:
        raise ValueError(f"framework is {document.framework!r}, but the run has no plan.")
    return framework.export(document.plan)


def fill_command(command: Sequence[str], document: RunDocument, file: str) -> tuple[str, ...]:
    """Return the command with the placeholders of the plan filled in.

    Args:
        file: path of the exported file as ranks see it.

    Raises:
        ValueError: as `export_run_plan`, or a placeholder has no value.
    """
    exported = export_run_plan(document)
    if exported is None or document.plan is None:
        return tuple(command)
    return fill_placeholders(command, document.plan, exported, file)
