"""A checkpoint of a job, now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from scheduler.cli.failure import Failed
from scheduler.cli.humanise import clock, number, span
from scheduler.cli.jobs import JobArgument
from scheduler.cli.output import Format, OutputOption, emit, facts, say
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

LOOK_EVERY_S = 0.5

WaitOption = Annotated[bool, typer.Option("--wait", help="Stay until it is complete.")]


def checkpoint(
    job: JobArgument, wait: WaitOption = False, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE
) -> None:
    """Have a running job save its state at the next step, and go on."""
    with service(url) as client:
        answer = client.checkpoint(job)
        while wait and answer["awaited"] is not None:
            time.sleep(LOOK_EVERY_S)
            answer = client.checkpoints(job)
        state = client.job(job)["state"]
    if wait and state != "running":
        raise Failed(f"job {job} is {state}: it may have gone without this checkpoint")
    if not wait:
        say(f"{job} saves at its next step; --wait stays until that is done.")
    emit(answer, output, lambda: facts(_shown(answer)))


def _shown(answer: Mapping[str, Any]) -> dict[str, str]:
    latest = answer["latest"]
    told = "none" if latest is None else f"of step {number(latest['step'])}, {clock(latest['completed_at_s'])} UTC"
    return {"job": answer["job_id"], "checkpoint": told, "every": span(answer["interval_s"])}
