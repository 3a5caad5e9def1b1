"""Checks of the demo's events, training losses and processes against its promises."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOSS_TOLERANCE = 1e-4
EXPECTED_EVENTS = {
    "a node is lent": "NodeLent",
    "a job is grown": "JobGrown",
    "a node is recalled": "NodeRecalled",
    "a job is shrunk": "JobShrunk",
    "a node is returned": "NodeReturned",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One expectation, whether it was met, and the observation."""

    expectation: str
    passed: bool
    observed: str


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The training ledger of one job and the ledger of an uninterrupted run of the same training."""

    name: str
    steps: int
    global_batch: int
    ledger: Path
    reference: Path


def check_events(events: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    """Check that each expected event occurred, no recalled node returned late, and no decision was illegal."""
    counts = Counter(event["code"] for event in events)
    for expectation, code in EXPECTED_EVENTS.items():
        yield CheckResult(expectation, counts[code] > 0, f"{counts[code]} times" if counts[code] != 1 else "once")
    late = [e for e in events if e["code"] == "Breach" and e["message"].startswith("recall-late")]
    early = [e["numbers"]["early_s"] for e in events if e["code"] == "NodeReturned" and "early_s" in e["numbers"]]
    returns = "1 return," if len(early) == 1 else f"{len(early)} returns, the latest"
    observed = f"{returns} {min(early, default=math.nan):.1f} s before its deadline"
    yield CheckResult("no return is late", not late and all(margin_s >= 0 for margin_s in early), observed)
    dropped = counts["DecisionDropped"]
    yield CheckResult("no decision is illegal", dropped == 0, f"{dropped} dropped")


def check_training(training: TrainingRun) -> Iterator[CheckResult]:
    """Check that the losses equal those of the uninterrupted run and that each sample was used exactly once."""
    losses, reference = _read_losses(training.ledger), _read_losses(training.reference)
    steps = range(1, training.steps + 1)
    complete = all(step in losses and step in reference for step in steps)
    furthest = max((abs(losses[s] - reference[s]) for s in steps), default=math.inf) if complete else math.inf
    observed = f"{len(losses)} of {training.steps} steps, largest difference {furthest:.1e}"
    yield CheckResult(
        f"{training.name}: losses equal those of an uninterrupted run", furthest <= LOSS_TOLERANCE, observed
    )
    yield _check_samples(training)


def check_leftover_processes(left: Sequence[int]) -> CheckResult:
    return CheckResult("all processes have exited", not left, f"{len(left)} left" + (f": {list(left)}" if left else ""))


def _check_samples(training: TrainingRun) -> CheckResult:
    """Check that each step used one full global batch, no step ran twice, and the samples equal the reference's."""
    ours, theirs = _read_samples(training.ledger), _read_samples(training.reference)
    steps = set(range(1, training.steps + 1))
    whole = all(len(samples) == training.global_batch for samples in ours.values())
    same = {step: sorted(samples) for step, samples in ours.items()} == {s: sorted(x) for s, x in theirs.items()}
    total = sum(len(samples) for samples in ours.values())
    observed = f"{total} samples in {len(ours)} steps, {training.steps * training.global_batch} expected"
    return CheckResult(
        f"{training.name}: every sample is used exactly once", whole and same and set(ours) == steps, observed
    )


def _read_losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in _read_lines(folder, "losses-*.jsonl")}


def _read_samples(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks and generations. A repeated step has twice the samples."""
    observed: dict[int, list[int]] = {}
    for line in _read_lines(folder, "samples-*.jsonl"):
        observed.setdefault(line["step"], []).extend(line["samples"])
    return observed


def _read_lines(folder: Path, pattern: str) -> Iterable[dict[str, Any]]:
    for path in sorted(folder.glob(pattern)):
        for line in path.read_text().splitlines():
            yield json.loads(line)
