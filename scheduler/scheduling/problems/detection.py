"""Find what is wrong with the service and its fleet, from one snapshot and a few more facts."""

from __future__ import annotations

from scheduler.domain.problems import Problem, get_problem_order
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.problems.evidence import Evidence
from scheduler.scheduling.problems.job_problems import find_job_problems
from scheduler.scheduling.problems.lending_problems import find_lending_problems
from scheduler.scheduling.problems.node_problems import find_node_problems
from scheduler.scheduling.problems.queue_problems import find_queue_problems
from scheduler.scheduling.problems.service_problems import find_service_problems


def find_problems(snapshot: Snapshot, evidence: Evidence) -> tuple[Problem, ...]:
    """Return all problems, the most severe first. A healthy fleet has none."""
    problems = [
        *find_service_problems(evidence),
        *find_lending_problems(snapshot, evidence),
        *find_node_problems(snapshot, evidence),
        *find_queue_problems(snapshot, evidence),
        *find_job_problems(snapshot, evidence),
    ]
    return tuple(sorted(problems, key=get_problem_order))
