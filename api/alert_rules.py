"""The alert rules for Prometheus that come with the package.

In the source tree, `data/rules.yaml` links to the file of the Helm chart. A wheel has a copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field
from typing_extensions import TypedDict

_RULES = Path(__file__).parent / "data" / "rules.yaml"
_RUNBOOK = "/docs/runbook"
_SEVERITIES = ("critical", "warning")
_TEMPLATE = re.compile(r"\{\{\s*\$(?:labels\.)?(\w+)[^}]*\}\}")


class AlertRuleView(TypedDict):
    """One alert rule."""

    name: Annotated[str, Field(description="Identifier that Prometheus shows, such as `EbbtideRecallLate`.")]
    severity: Annotated[
        str,
        Field(description="Label by which a receiver is chosen: `critical` should page, `warning` open a ticket."),
    ]
    summary: Annotated[
        str, Field(description="Explanation of the alert. Labels and values are in angle brackets, such as `<pool>`.")
    ]
    expression: Annotated[str, Field(description="PromQL condition.")]
    pending: Annotated[str, Field(description="How long the condition must hold, such as `5m`.")]
    runbook: Annotated[str, Field(description="Path of the section of the runbook about this alert.")]


@cache
def load_alert_rules() -> list[AlertRuleView]:
    """Return all alert rules, the most severe first. Do not modify the list."""
    return sorted(_read_rules(), key=lambda rule: (_rank(rule["severity"]), rule["name"]))


def _read_rules() -> Iterator[AlertRuleView]:
    document: dict[str, Any] = yaml.safe_load(_RULES.read_text(encoding="utf-8"))
    for rule in (rule for group in document["groups"] for rule in group["rules"] if "alert" in rule):
        yield {
            "name": rule["alert"],
            "severity": rule["labels"]["severity"],
            "summary": _TEMPLATE.sub(r"<\1>", rule["annotations"]["summary"]),
            "expression": " ".join(rule["expr"].split()),
            "pending": rule.get("for", "0m"),
            "runbook": f"{_RUNBOOK}#{rule['alert'].lower()}",
        }


def _rank(severity: str) -> int:
    return _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES)
