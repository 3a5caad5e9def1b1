"""Problems of the service as a whole: no controller, low goodput, or receivers of webhooks that fail."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.domain.events import Webhook
from scheduler.domain.problems import Problem, ProblemCode, Severity, SubjectKind
from scheduler.scheduling.problems.evidence import Evidence, GpuTimeUse
from scheduler.scheduling.problems.sentences import describe_count, describe_gpu_hours, shorten

GOODPUT_TARGET, GOODPUT_ALARM = 0.9, 0.5
"""Below the target, a tenth of the GPU time is wasted; below the alarm, most machines might as well be off."""
GPU_S_MIN, LOST_GPU_S_MIN = 8 * 3600.0, 3600.0
"""A share is stated for at least eight GPU-hours, such as one node for an hour, and one GPU-hour of lost work: a small
test that loses its work is no problem of the service."""
DEAD_MIN = 3
"""Dead messages in a row. Each was tried for hours, so three are no accident."""
_REASON_MAX = 120


def find_service_problems(evidence: Evidence) -> Iterator[Problem]:
    if not evidence.has_leader:
        yield Problem(
            ProblemCode.CONTROLLER_MISSING,
            Severity.CRITICAL,
            SubjectKind.SERVICE,
            "",
            "No controller leads: nothing is started, lent or recalled, and requests wait.",
            "Start the controller, or read why it stopped.",
            "ebbtide doctor",
        )
    if evidence.gpu_time is not None:
        yield from _find_low_goodput(evidence.gpu_time)
    yield from (_describe_webhook(webhook) for webhook in evidence.webhooks if _is_failing(webhook))


def _find_low_goodput(use: GpuTimeUse) -> Iterator[Problem]:
    if use.gpu_s < GPU_S_MIN or use.lost_gpu_s < LOST_GPU_S_MIN:
        return
    goodput = max(0.0, 1.0 - use.lost_gpu_s / use.gpu_s)
    if goodput >= GOODPUT_TARGET:
        return
    yield Problem(
        ProblemCode.GOODPUT_LOW,
        Severity.CRITICAL if goodput < GOODPUT_ALARM else Severity.WARNING,
        SubjectKind.SERVICE,
        "",
        f"Jobs held {describe_gpu_hours(use.gpu_s)} and lost the work of {describe_gpu_hours(use.lost_gpu_s)}: goodput "
        f"is {goodput:.0%}, and the target {GOODPUT_TARGET:.0%}.",
        "Find the queues and jobs that lose work, and let them save more often.",
        "ebbtide usage --by hour,queue",
        since_s=use.since_s,
        numbers={"gpu_s": use.gpu_s, "lost_gpu_s": use.lost_gpu_s, "goodput": goodput, "target": GOODPUT_TARGET},
    )


def _is_failing(webhook: Webhook) -> bool:
    return bool(webhook.disabled_reason) if not webhook.enabled else webhook.dead_in_a_row >= DEAD_MIN


def _describe_webhook(webhook: Webhook) -> Problem:
    dead = describe_count(webhook.dead_in_a_row, "message")
    found = f"could not deliver its last {dead}" if webhook.enabled else "was switched off"
    reason = f": {shorten(webhook.disabled_reason, _REASON_MAX)}" if webhook.disabled_reason else ""
    return Problem(
        ProblemCode.WEBHOOK_FAILING,
        Severity.WARNING,
        SubjectKind.WEBHOOK,
        webhook.id,
        f"Webhook {webhook.id} of {webhook.owner or 'an unnamed caller'} {found}{reason}.",
        "Repair the receiver, then enable the webhook and deliver dead messages again.",
        f"ebbtide webhooks deliveries {webhook.id}",
        queue=webhook.queue,
        numbers={"dead": float(webhook.dead_in_a_row)},
    )
