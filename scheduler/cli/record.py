"""What happened and why: events, the explanation and the history of a job, the snapshot."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.failure import Failed
from scheduler.cli.humanise import clock, counted, gpus, number, span
from scheduler.cli.jobs import JobArgument
from scheduler.cli.output import Format, OutputOption, columns, emit, facts, say, stacked
from scheduler.cli.service import DEFAULT_URL, UrlOption, service
from scheduler.cli.watching import FollowOption, pour

if TYPE_CHECKING:
    from rich.console import RenderableType

SubjectArgument = Annotated[str, typer.Argument(metavar="[JOB|NODE|POOL]", help="Only what happened to it.")]
LimitOption = Annotated[int, typer.Option("-n", "--limit", min=1, max=100_000, help="At most so many, the newest.")]
ToOption = Annotated[str, typer.Option("--to", metavar="FILE", help="Write it here instead of to standard output.")]
PAGE = 1000
_HOLDERS_MAX = 8


def events(
    subject: SubjectArgument = "",
    limit: LimitOption = 50,
    follow: FollowOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """List what happened last, oldest first; with -f go on with what happens."""
    with service(url) as client:
        found = list(deque(client.events(subject=subject, limit=PAGE), maxlen=limit))
        if follow:
            after = found[-1]["number"] if found else 0
            pour(chain(found, client.follow_events(subject=subject, after=after)), output, _event_line)
            return
    emit(found, output, lambda: event_rows(found))


def _event_line(event: Mapping[str, Any]) -> str:
    return f"{clock(event['at_s'])}  {event['code']:<18}  {event['subject']}  {event['message']}"


def event_rows(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    return columns(
        ([clock(event["at_s"]), event["code"], event["subject"], event["message"]] for event in found),
        heads=["time (UTC)", "event", "of", "what happened"],
        empty="Nothing has happened yet.",
    )


def explain(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Say in words and numbers why a job is where it is."""
    with service(url) as client:
        found = client.explanation(job)
    emit(found, output, lambda: explanation_view(found))


def explanation_view(found: Mapping[str, Any]) -> RenderableType:
    """Sentences with numbers: where the job is, why, who has what it needs, and what would change that."""
    from rich.text import Text

    sentences = [_standing(found)]
    if "needed_gpus" in found:
        wants = (
            f"{gpus(found['needed_gpus'])} to start" if found["reason"] else f"at least {gpus(found['needed_gpus'])}"
        )
        free = f"{gpus(found['free_gpus'])} that training may use {_are(found['free_gpus'])} free"
        sentences.append(f"It needs {wants} and holds {found['held_gpus']}; {free}.")
        sentences += _obstacles(found)
    if found["next"]:
        decision = found["next"]
        sentences.append(f"The next tick would do {decision['kind']}: {decision['reason']['detail']}.")
    return Text("\n".join(sentences))


def _standing(found: Mapping[str, Any]) -> str:
    """The first sentence. An ended job's summary is what was said of its end, which may be no more than its state."""
    ended = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}
    job_id, state, summary = found["job_id"], found["state"], found["summary"]
    if state not in ended:
        return f"{job_id} is {summary}."
    return f"{job_id} {ended[state]}." if summary == state else f"{job_id} {ended[state]}: {summary}."


def _obstacles(found: Mapping[str, Any]) -> Iterator[str]:
    if reason := found["reason"]:
        figures = ", ".join(f"{name} {number(value)}" for name, value in reason["numbers"].items())
        yield f"It waits with {reason['code']}" + (f" ({figures})." if figures else ".")
        if found["holders"]:
            listed = [f"{gpus(held)} ({job})" for job, held in found["holders"].items()]
            others = listed[_HOLDERS_MAX:]
            more = f" and {counted(len(others), 'other job')} the rest" if others else ""
            yield f"Other jobs hold {', '.join(listed[:_HOLDERS_MAX])}{more}."
    if found["unblocks"]:
        yield f"What would unblock it: {found['unblocks']}."
    if reason and found["expected_start_s"] is not None:
        left_s = max(0.0, found["expected_start_s"] - time.time())
        yield f"It is expected to start in {span(left_s)}, at {clock(found['expected_start_s'])} UTC."


def _are(count: float) -> str:
    return "is" if count == 1 else "are"


def history(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Show the states that a job went through, and what it held; -o json: its loss and throughput over time, too."""
    with service(url) as client:
        found = client.history(job)
    emit(found, output, lambda: _history_view(found))


def _history_view(found: Mapping[str, Any]) -> RenderableType:
    states = columns(
        ([clock(step["at_s"]), step["state"], step["message"]] for step in found["states"]),
        heads=["time (UTC)", "state", "why"],
    )
    figures = ("gpus", "lent_gpus", "generation")
    held = columns(
        (
            [clock(step["at_s"]), *(str(step[name]) for name in figures), step["plan"] or "-"]
            for step in found["allocations"]
        ),
        heads=["since (UTC)", "GPUs", "lent", "generation", "plan"],
        right=["GPUs", "lent", "generation"],
    )
    return stacked(states, "", held)


def snapshot(to: ToOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = Format.JSON) -> None:
    """Download the newest snapshot; `ebbtide replay` decides on it again."""
    with service(url) as client:
        document = client.snapshot()
    if not to:
        emit(document, output, lambda: _snapshot_view(document))
        return
    try:
        Path(to).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as wrong:
        raise Failed(f"--to: {to}: cannot be written: {wrong.strerror or wrong}") from wrong
    say(f"Snapshot of generation {document['generation']} is in {to}.")


def _snapshot_view(document: Mapping[str, Any]) -> RenderableType:
    counted = {name: str(len(document[name])) for name in ("pools", "nodes", "jobs", "loans", "curves")}
    return facts({"generation": str(document["generation"]), "at": f"{clock(document['now_s'])} UTC", **counted})
