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

from cli.commands.jobs import JobArgument
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import CommandError
from cli.output import (
    FollowOption,
    OutputFormat,
    OutputOption,
    format_count,
    format_duration,
    format_gpus,
    format_number,
    format_time,
    print_document,
    print_message,
    print_stream,
    render_facts,
    render_table,
    stack,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


SubjectArgument = Annotated[str, typer.Argument(metavar="[JOB|NODE|POOL]", help="Only what happened to it.")]
LimitOption = Annotated[int, typer.Option("-n", "--limit", min=1, max=100_000, help="At most so many, the newest.")]
OutputFileOption = Annotated[
    str, typer.Option("--to", metavar="FILE", help="Write it here instead of to standard output.")
]
EVENTS_PAGE_SIZE = 1000
_HOLDERS_MAX = 8


def events(
    subject: SubjectArgument = "",
    limit: LimitOption = 50,
    follow: FollowOption = False,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List what happened last, oldest first; with -f go on with what happens."""
    with service_client(url) as client:
        found = list(deque(client.events(subject=subject, limit=EVENTS_PAGE_SIZE), maxlen=limit))
        if follow:
            after = found[-1]["number"] if found else 0
            print_stream(chain(found, client.follow_events(subject=subject, after=after)), output, _format_event)
            return
    print_document(found, output, lambda: render_events(found))


def _format_event(event: Mapping[str, Any]) -> str:
    return f"{format_time(event['at_s'])}  {event['code']:<18}  {event['subject']}  {event['message']}"


def render_events(events_found: Iterable[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        ([format_time(event["at_s"]), event["code"], event["subject"], event["message"]] for event in events_found),
        headers=["time (UTC)", "event", "of", "what happened"],
        empty="Nothing has happened yet.",
    )


def explain(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Say in words and numbers why a job is where it is."""
    with service_client(url) as client:
        found = client.explanation(job)
    print_document(found, output, lambda: render_explanation(found))


def render_explanation(explanation: Mapping[str, Any]) -> RenderableType:
    """Sentences with numbers: where the job is, why, who has what it needs, and what would change that."""
    from rich.text import Text

    sentences = [_describe_state(explanation)]
    if "needed_gpus" in explanation:
        wants = (
            f"{format_gpus(explanation['needed_gpus'])} to start"
            if explanation["reason"]
            else f"at least {format_gpus(explanation['needed_gpus'])}"
        )
        free = f"{format_gpus(explanation['free_gpus'])} that training may use {_select_verb(explanation['free_gpus'])} free"
        sentences.append(f"It needs {wants} and holds {explanation['held_gpus']}; {free}.")
        sentences += _describe_blockers(explanation)
    if explanation["next"]:
        decision = explanation["next"]
        sentences.append(f"The next tick would do {decision['kind']}: {decision['reason']['detail']}.")
    return Text("\n".join(sentences))


def _describe_state(explanation: Mapping[str, Any]) -> str:
    """The first sentence. An ended job's summary is what was said of its end, which may be no more than its state."""
    ended = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}
    job_id, state, summary = explanation["job_id"], explanation["state"], explanation["summary"]
    if state not in ended:
        return f"{job_id} is {summary}."
    return f"{job_id} {ended[state]}." if summary == state else f"{job_id} {ended[state]}: {summary}."


def _describe_blockers(explanation: Mapping[str, Any]) -> Iterator[str]:
    if reason := explanation["reason"]:
        figures = ", ".join(f"{name} {format_number(value)}" for name, value in reason["numbers"].items())
        yield f"It waits with {reason['code']}" + (f" ({figures})." if figures else ".")
        if explanation["holders"]:
            listed = [f"{format_gpus(held)} ({job})" for job, held in explanation["holders"].items()]
            others = listed[_HOLDERS_MAX:]
            more = f" and {format_count(len(others), 'other job')} the rest" if others else ""
            yield f"Other jobs hold {', '.join(listed[:_HOLDERS_MAX])}{more}."
    if explanation["unblocks"]:
        yield f"What would unblock it: {explanation['unblocks']}."
    if reason and explanation["expected_start_s"] is not None:
        left_s = max(0.0, explanation["expected_start_s"] - time.time())
        yield f"It is expected to start in {format_duration(left_s)}, at {format_time(explanation['expected_start_s'])} UTC."


def _select_verb(count: float) -> str:
    return "is" if count == 1 else "are"


def history(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the states that a job went through, and what it held; -o json: its loss and throughput over time, too."""
    with service_client(url) as client:
        found = client.history(job)
    print_document(found, output, lambda: _render_history(found))


def _render_history(found: Mapping[str, Any]) -> RenderableType:
    states = render_table(
        ([format_time(step["at_s"]), step["state"], step["message"]] for step in found["states"]),
        headers=["time (UTC)", "state", "why"],
    )
    figures = ("gpus", "lent_gpus", "generation")
    held = render_table(
        (
            [format_time(step["at_s"]), *(str(step[name]) for name in figures), step["plan"] or "-"]
            for step in found["allocations"]
        ),
        headers=["since (UTC)", "GPUs", "lent", "generation", "plan"],
        right_aligned=["GPUs", "lent", "generation"],
    )
    return stack(states, "", held)


def snapshot(to: OutputFileOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.JSON) -> None:
    """Download the newest snapshot; `ebbtide replay` decides on it again."""
    with service_client(url) as client:
        document = client.snapshot()
    if not to:
        print_document(document, output, lambda: _render_snapshot(document))
        return
    try:
        Path(to).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as wrong:
        raise CommandError(f"--to: {to}: cannot be written: {wrong.strerror or wrong}") from wrong
    print_message(f"Snapshot of generation {document['generation']} is in {to}.")


def _render_snapshot(document: Mapping[str, Any]) -> RenderableType:
    counted = {name: str(len(document[name])) for name in ("pools", "nodes", "jobs", "loans", "curves")}
    return render_facts(
        {"generation": str(document["generation"]), "at": f"{format_time(document['now_s'])} UTC", **counted}
    )
