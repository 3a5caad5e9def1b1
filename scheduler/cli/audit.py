"""`audit`: who asked for which change."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated

import typer

from scheduler.cli.humanise import clock
from scheduler.cli.output import Format, OutputOption, columns, emit
from scheduler.cli.record import LimitOption
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

ActorOption = Annotated[str, typer.Option("--actor", help="Only what this one asked for.")]
SubjectOption = Annotated[str, typer.Option("--subject", help="Only what this job, node, pool, queue or token saw.")]
HoursOption = Annotated[float | None, typer.Option("--hours", min=0, help="Only of the last so many hours.")]


def audit(
    actor: ActorOption = "",
    subject: SubjectOption = "",
    hours: HoursOption = None,
    *,
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """List who asked for which change, oldest first; admins only."""
    since_s = None if hours is None else time.time() - hours * 3600.0
    with service(url) as client:
        found = list(deque(client.audit(actor=actor, subject=subject, since_s=since_s), maxlen=limit))
    emit(
        found,
        output,
        lambda: columns(
            (
                [
                    clock(each["at_s"]),
                    each["actor"],
                    each["action"],
                    each["subject"],
                    each["outcome"],
                    each["request_id"],
                ]
                for each in found
            ),
            heads=["time (UTC)", "who", "what", "of", "outcome", "request"],
            empty="Nobody has asked for a change.",
        ),
    )
