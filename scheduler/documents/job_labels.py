"""Labels of jobs in documents: of a job, of a change, and of a Kubernetes object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import InvalidDocumentError, InvalidField, Text, invalid_field, to_printable
from scheduler.domain.job_labels import (
    SELECTOR_FORM,
    LabelSelector,
    SelectorError,
    find_label_problem,
    is_reserved_key,
    parse_selector,
)


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    problem = find_label_problem(labels)
    if problem is not None and not problem.key:
        raise PydanticCustomError("labels", "Input should be {form}", {"form": problem.allowed})
    if problem is not None:
        raise invalid_field(problem.key, problem.value, problem.allowed)
    return labels


def _check_label_changes(changes: dict[str, str | None]) -> dict[str, str | None]:
    _check_labels({key: value or "" for key, value in changes.items()})
    return changes


JobLabels = Annotated[dict[Text, Text], AfterValidator(_check_labels)]
LabelChanges = Annotated[dict[Text, Text | None], AfterValidator(_check_label_changes)]
"""Labels to set. Null removes a label."""


def select_object_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a Kubernetes object that are labels of its job: all but Ebbtide's own."""
    return {key: value for key, value in labels.items() if not is_reserved_key(key)}


def parse_selector_parameter(field: str, text: str) -> LabelSelector:
    """Parse the label selector in the parameter `field`.

    Raises:
        InvalidDocumentError: the text is no selector.
    """
    try:
        return parse_selector(text)
    except SelectorError as error:
        allowed = f"{SELECTOR_FORM}; {error}"
        raise InvalidDocumentError(InvalidField(field, to_printable(text), allowed)) from None
