"""Checks of the demo's events, training losses and processes against its promises."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.demo.day_view import summarize_recalls

if TYPE_CHECKING:
    from api.demo import DemoView
    from ebbtide.client.views import RecallReceiptView, UsageSumsView

LOSS_TOLERANCE = 1e-4
HOUR_S = 3600.0
EXPECTED_EVENTS = {
    "lent": "NodeLent",
    "grown": "JobGrown",
    "recalled": "NodeRecalled",
    "shrunk": "JobShrunk",
    "returned": "NodeReturned",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One claim of the demo, what it asks for, what was measured, and whether the claim holds."""

    claim: str
    asked: str
    measured: str
    passed: bool


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The training ledger of one job and the ledger of an uninterrupted run of the same training."""

    name: str
    steps: int
    global_batch: int
    ledger: Path
    reference: Path


def check_usage(total: UsageSumsView) -> CheckResult:
    """Check that jobs used lent GPUs, by the accounting of the service."""
    lent_hours, lost_hours = total["lent_gpu_s"] / HOUR_S, total["lost_gpu_s"] / HOUR_S
    measured = f"{lent_hours:.2f} GPU-hours, {lost_hours:.2f} GPU-hours of work lost"
    return CheckResult("jobs used lent GPUs", "more than 0 GPU-hours", measured, lent_hours > 0)


def check_recalls(receipts: Sequence[RecallReceiptView]) -> CheckResult:
    """Check that there were recalls and that none was late, by their receipts."""
    summary = summarize_recalls(receipts)
    measured = f"{summary.late} of {summary.total} late"
    if summary.margin_s is not None:
        measured += f", closest return {summary.margin_s:.1f} s before its deadline"
    return CheckResult("recalled nodes return in time", "0 late", measured, summary.total > 0 and summary.late == 0)


def check_surge(receipts: Sequence[RecallReceiptView], day: DemoView) -> CheckResult | None:
    """Check that the nodes that the last surge recalled returned in time. Return None without a surge."""
    began_s, until_s = day["surged_at_s"], day["surge_until_s"]
    if began_s is None or until_s is None:
        return None
    recalled = [receipt for receipt in receipts if began_s <= receipt["asked_at_s"] < until_s]
    late = sum(receipt["outcome"] in ("late", None) for receipt in recalled)
    measured = f"{len(recalled)} recalled, {late} late"
    return CheckResult("a surge recalls lent nodes in time", "0 late", measured, late == 0)


def check_events(events: Sequence[Mapping[str, Any]], *, subjects: Collection[str]) -> Iterator[CheckResult]:
    """Check that each expected event occurred to one of the `subjects`, and that no decision was illegal."""
    counts = Counter(event["code"] for event in events if event["subject"] in subjects)
    missing = [claim for claim, code in EXPECTED_EVENTS.items() if not counts[code]]
    times = ", ".join(f"{counts[code]} {word}" for word, code in EXPECTED_EVENTS.items())
    yield CheckResult("trainings follow the loans of this machine", "each at least once", times, not missing)
    dropped = sum(event["code"] == "DecisionDropped" for event in events)
    yield CheckResult("every decision is legal", "0 dropped", f"{dropped} dropped", dropped == 0)


def check_training(training: TrainingRun) -> Iterator[CheckResult]:
    """Check that the losses equal those of the uninterrupted run and that each sample was used exactly once."""
    losses, reference = _read_losses(training.ledger), _read_losses(training.reference)
    steps = range(1, training.steps + 1)
    complete = all(step in losses and step in reference for step in steps)
    furthest = max((abs(losses[s] - reference[s]) for s in steps), default=math.inf) if complete else math.inf
    measured = f"{furthest:.1e} in {len(losses)} of {training.steps} steps"
    claim = f"{training.name}: losses equal an uninterrupted run"
    yield CheckResult(claim, f"difference of {LOSS_TOLERANCE:.0e} at most", measured, furthest <= LOSS_TOLERANCE)
    yield _check_samples(training)


def check_leftover_processes(left: Sequence[int]) -> CheckResult:
    """Check that no process of the demo is left. `left` are process ids."""
    measured = f"{len(left)} left" + (f": {list(left)}" if left else "")
    return CheckResult("every process has exited", "0 left", measured, not left)


def build_summary(total: UsageSumsView, receipts: Sequence[RecallReceiptView], losses: Iterable[CheckResult]) -> str:
    """Return the last line of the demo."""
    recalls, are_equal = summarize_recalls(receipts), all(result.passed for result in losses)
    late = f"{recalls.late} recall late" if recalls.late == 1 else f"{recalls.late} recalls late"
    comparison = "losses equal to an uninterrupted run" if are_equal else "losses that DIFFER from an uninterrupted run"
    return f"{total['lent_gpu_s'] / HOUR_S:.2f} GPU-hours recovered, {late}, {comparison}"


def _check_samples(training: TrainingRun) -> CheckResult:
    """Check that each step used one full global batch, no step ran twice, and the samples equal the reference's."""
    ours, theirs = _read_samples(training.ledger), _read_samples(training.reference)
    steps = set(range(1, training.steps + 1))
    whole = all(len(samples) == training.global_batch for samples in ours.values())
    same = {step: sorted(samples) for step, samples in ours.items()} == {s: sorted(x) for s, x in theirs.items()}
    total = sum(len(samples) for samples in ours.values())
    asked, measured = f"{training.steps * training.global_batch} samples", f"{total} samples in {len(ours)} steps"
    claim = f"{training.name}: every sample is used exactly once"
    return CheckResult(claim, asked, measured, whole and same and set(ours) == steps)


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
