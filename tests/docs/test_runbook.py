"""The runbook has a section for each problem and each alert, and its table of problems is that of the code."""

from __future__ import annotations

import re
from pathlib import Path

from api.alert_rules import load_alert_rules
from scheduler.domain.problems import MEANINGS, ProblemCode
from scheduler.scheduling.problems.detection import find_problems
from tests.unit.scheduling.problems.planted import planted_evidence, planted_snapshot

RUNBOOK = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "runbook.md"
ROW = re.compile(r"^\| \[(\w+)\]\(#(\w+)\) \| ([\w, ]+) \| (.+) \|$", re.MULTILINE)


def test_table_of_problems_is_that_of_the_code() -> None:
    rows = ROW.findall(RUNBOOK.read_text(encoding="utf-8"))
    assert [(code, anchor, meaning) for code, anchor, _, meaning in rows] == [
        (code.value, code.value.lower(), MEANINGS[code]) for code in ProblemCode
    ]
    severities = {code: severity.split(", ") for code, _, severity, _ in rows}
    for problem in find_problems(planted_snapshot(), planted_evidence()):
        assert problem.severity.value in severities[problem.code.value]


def test_each_problem_and_alert_has_a_section() -> None:
    headings = set(re.findall(r"^### (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE))
    assert {code.value for code in ProblemCode} <= headings
    assert {rule["name"] for rule in load_alert_rules()} <= headings
