"""`ebbtide events`, `explain`, `history` and `snapshot`: what the scheduler did, and why."""

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
from cli.commands.pool_explanation import explain_pool
from cli.completion import complete_job_ids, complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import CommandError, InputError
from cli.job_lookup import TERMINAL_STATES, find_job_id
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


SubjectArgument = Annotated[
    str, typer.Argument(metavar="[JOB|NODE|POOL]", help="Show only events of this job, node or pool.")
]
LimitOption = Annotated[
    int, typer.Option("-n", "--limit", min=1, max=100_000, help="Number of entries, counted from the newest.")
]
OutputFileOption = Annotated[str, typer.Option("--to", metavar="FILE", help="Write to this file instead of stdout.")]
ExplainedArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        autocompletion=complete_job_ids,
        help="ID or name of the job, or the beginning of one; or the word `pool`, before the name of a pool.",
    ),
]
ExplainedPoolArgument = Annotated[
    str, typer.Argument(metavar="[POOL]", autocompletion=complete_pool_names, help="After `pool`: name of a pool.")
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
    """List the most recent events, oldest first. With -f, keep printing new events."""
    with service_client(url) as client:
        result = list(deque(client.events(subject=subject, limit=EVENTS_PAGE_SIZE), maxlen=limit))
        if follow:
            after = result[-1]["number"] if result else 0
            print_stream(chain(result, client.follow_events(subject=subject, after=after)), output, _format_event)
            return
    print_document(result, output, lambda: render_events(result))


def _format_event(event: Mapping[str, Any]) -> str:
    return f"{format_time(event['at_s'])}  {event['code']:<18}  {event['subject']}  {event['message']}"


def render_events(events_found: Iterable[Mapping[str, Any]]) -> RenderableType:
    return render_table(
        ([format_time(event["at_s"]), event["code"], event["subject"], event["message"]] for event in events_found),
        headers=["time (UTC)", "event", "subject", "message"],
        empty="There are no events.",
    )


def explain(
    job: ExplainedArgument,
    pool: ExplainedPoolArgument = "",
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Explain why a job is in its current state, or why a pool lends no more nodes.

    `ebbtide explain pool NAME` explains a pool. With one word, even `pool`, it explains the job of that name.
    """
    if pool:
        if job != "pool":
            raise InputError(f"JOB is {job!r}, but a second word names a pool. Use `ebbtide explain pool {pool}`")
        explain_pool(pool, url, output)
        return
    with service_client(url) as client:
        result = client.explanation(find_job_id(client, job))
    print_document(result, output, lambda: render_explanation(result))


def render_explanation(explanation: Mapping[str, Any]) -> RenderableType:
    """Return sentences on the job's state, the reason for it, the jobs that hold GPUs, and what would unblock it."""
    from rich.text import Text

    sentences = [_describe_state(explanation)]
    if "needed_gpus" in explanation and explanation["state"] not in TERMINAL_STATES:
        needed = format_gpus(explanation["needed_gpus"])
        needs = f"{needed} to start" if explanation["reason"] else f"at least {needed}"
        free = explanation["free_gpus"]
        sentences.append(
            f"It needs {needs} and holds {explanation['held_gpus']}; "
            f"{format_gpus(free)} available to training {'is' if free == 1 else 'are'} free."
        )
        sentences += _describe_blockers(explanation)
    if explanation["failure"] and explanation["state"] != "failed":
        sentences.append(f"Its last failure: {explanation['failure']['reason'].rstrip('.')}.")
    if explanation["next"]:
        decision = explanation["next"]
        sentences.append(f"Decision of the next tick: {decision['kind']} ({decision['reason']['detail']}).")
    return Text("\n".join(sentences))


def _describe_state(explanation: Mapping[str, Any]) -> str:
    """Return the first sentence. The summary of an ended job is the message of its end, or its state."""
    ended = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}
    job_id, state, summary = explanation["job_id"], explanation["state"], explanation["summary"].rstrip(".")
    if state not in ended:
        return f"{job_id} is {summary}."
    return f"{job_id} {ended[state]}." if summary == state else f"{job_id} {ended[state]}: {summary}."


def _describe_blockers(explanation: Mapping[str, Any]) -> Iterator[str]:
    if reason := explanation["reason"]:
        figures = ", ".join(f"{name} {format_number(value)}" for name, value in reason["numbers"].items())
        yield f"It is pending: {reason['code']}" + (f" ({figures})." if figures else ".")
        if explanation["holders"]:
            listed = [f"{format_gpus(held)} ({job})" for job, held in explanation["holders"].items()]
            others = listed[_HOLDERS_MAX:]
            more = f" and {format_count(len(others), 'more job')}" if others else ""
            yield f"Other jobs hold {', '.join(listed[:_HOLDERS_MAX])}{more}."
    if explanation["unblocks"]:
        yield f"Unblocked by: {explanation['unblocks'].rstrip('.')}."
    if reason and explanation["expected_start_s"] is not None:
        start_s = explanation["expected_start_s"]
        delay = format_duration(max(0.0, start_s - time.time()))
        yield f"Expected start: in {delay}, at {format_time(start_s)} UTC."


def history(job: JobArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show a job's past states and allocations. With -o json, also its loss and throughput over time."""
    with service_client(url) as client:
        result = client.history(find_job_id(client, job))
    print_document(result, output, lambda: _render_history(result))


def _render_history(result: Mapping[str, Any]) -> RenderableType:
    states = render_table(
        ([format_time(step["at_s"]), step["state"], step["message"]] for step in result["states"]),
        headers=["time (UTC)", "state", "message"],
    )
    figures = ("gpus", "lent_gpus", "generation")
    held = render_table(
        (
            [format_time(step["at_s"]), *(str(step[name]) for name in figures), step["plan"] or "-"]
            for step in result["allocations"]
        ),
        headers=["since (UTC)", "GPUs", "lent", "generation", "plan"],
        right_aligned=["GPUs", "lent", "generation"],
    )
    return stack(states, "", held)


def snapshot(to: OutputFileOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.JSON) -> None:
    """Download the scheduler's latest snapshot. `ebbtide replay` runs a scheduling cycle on it."""
    with service_client(url) as client:
        document = client.snapshot()
    if not to:
        print_document(document, output, lambda: _render_snapshot(document))
        return
    try:
        Path(to).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--to: {to}: cannot be written: {error.strerror or error}") from error
    print_message(f"Snapshot of generation {document['generation']} written to {to}.")


def _render_snapshot(document: Mapping[str, Any]) -> RenderableType:
    counted = {name: str(len(document[name])) for name in ("pools", "nodes", "jobs", "loans", "curves")}
    return render_facts(
        {"generation": str(document["generation"]), "at": f"{format_time(document['now_s'])} UTC", **counted}
    )
