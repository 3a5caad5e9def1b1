"""The safety report of a pool as text for the terminal, as Markdown and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from cli.output import format_count, format_duration, format_number, format_time, render_table, stack
from cli.report_page import (
    CHARTS_PLACE,
    ChartsData,
    render_html_facts,
    render_html_section,
    render_html_table,
    render_markdown_table,
    render_report_page,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

Document = Mapping[str, Any]
Rows = list[tuple[str, str]]

_DAY_HEADERS = ("day", "late returns", "nodes lost", "short intervals", "lost GPU-hours")
_JOB_HEADERS = ("job", "owner", "GPUs", "exit", "told after", "left after", "saved", "lost steps")
_NOTES = (
    "A recall is in time if no job held GPUs of the node at its deadline, as observed by the control loop.",
    "An interval of five minutes is short if demand exceeded the GPUs that were not lent, and not lent within a cold "
    "start before. Without loans no interval is short.",
    "Lost work is what jobs had computed since their last checkpoint when they left a recalled node.",
    "Days and times are in UTC. A recall counts on the day on which it was made.",
)


def list_facts(report: Document) -> Rows:
    """Return the figures of the report, each with its name."""
    outcomes, times = report["outcomes"], report["return_times"]
    target = "none" if report["target"] is None else f"{report['target']:.3%}"
    share = report["short_intervals"] / report["intervals"] if report["intervals"] else 0.0
    rows = [
        ("loans", format_number(report["loans"])),
        ("GPU-hours lent", format_number(report["lent_gpu_hours"], 1)),
        ("recalls", format_number(report["recalls"])),
        ("returned in time", format_number(outcomes["in_time"])),
        ("returned late", format_number(outcomes["late"])),
        ("cancelled", format_number(outcomes["cancelled"])),
        ("node lost before its return", format_number(outcomes["lost"])),
        ("not ended yet", format_number(report["open_recalls"])),
    ]
    if times is not None:
        rows += [
            ("time to return, median", format_duration(times["p50_s"])),
            ("time to return, p95", format_duration(times["p95_s"])),
            ("time to return, longest", format_duration(times["max_s"])),
            ("largest share of a deadline used", f"{times['deadline_ratio_max']:.1%}"),
        ]
    return [
        *rows,
        ("intervals with known demand", format_number(report["intervals"])),
        ("short intervals", f"{format_number(report['short_intervals'])} ({share:.3%})"),
        ("target of short intervals", target),
        ("intervals computed from readings", format_number(report["recomputed_intervals"])),
        ("work lost, GPU-hours", format_number(report["lost_gpu_hours"], 2)),
        ("work lost, steps", format_number(report["lost_steps"], 0)),
    ]


def list_receipt_facts(receipt: Document) -> Rows:
    """Return what a receipt records, each with its name. Durations count from the recall."""
    asked_s, choice = receipt["asked_at_s"], receipt["choice"]
    rows = [
        ("node", f"{receipt['node']} ({format_count(receipt['gpus'], 'GPU')})"),
        ("recalled at", format_time(asked_s)),
        ("reason", receipt["detail"]),
        ("outcome", (receipt["outcome"] or "open").replace("_", " ")),
        ("deadline after", format_duration(receipt["return_by_s"] - asked_s)),
    ]
    named = {"all jobs told after": "acknowledged_at_s", "free after": "freed_at_s", "returned after": "returned_at_s"}
    rows += [(name, _format_after(receipt[field], asked_s)) for name, field in named.items()]
    rows.append(("inference used it after", _format_after(receipt["serving_at_s"], asked_s)))
    if choice is not None:
        cost = f"{format_number(choice['cost_gpu_s'], 0)} GPU-seconds for {format_count(choice['nodes'], 'node')}"
        rows += [("expected cost", cost), ("lent nodes that stayed", format_number(choice["alternatives"]))]
    return rows


def list_job_rows(receipt: Document) -> list[tuple[str, ...]]:
    """Return a row for each job that had to leave the node."""
    asked_s = receipt["asked_at_s"]
    return [
        (
            job["job_id"],
            job["owner"] or "-",
            format_number(job["gpus"]),
            job["exit"] or "-",
            _format_after(job["acknowledged_at_s"], asked_s),
            _format_after(job["left_at_s"], asked_s),
            "yes" if job["saved"] else "no",
            format_number(job["lost_steps"], 0),
        )
        for job in receipt["jobs"]
    ]


def render_report_table(report: Document) -> RenderableType:
    """Return the report for the terminal."""
    from rich.text import Text

    parts: list[RenderableType] = [Text(report["summary"]), Text("")]
    parts.append(render_table(list_facts(report), headers=["", report["month"]], right_aligned=[report["month"]]))
    if report["days"]:
        parts += [Text(""), render_table(_list_day_rows(report), headers=_DAY_HEADERS, right_aligned=_DAY_HEADERS[1:])]
    return stack(*parts)


def render_report_markdown(report: Document) -> str:
    """Return the report as Markdown."""
    parts = [f"# {_get_title(report)}\n", f"{report['summary']}\n", f"{_get_period(report)}\n", "## Figures\n"]
    parts.append(render_markdown_table(list_facts(report), headers=("figure", "value")))
    parts.append("## Days with problems or lost work\n")
    days = render_markdown_table(_list_day_rows(report), headers=_DAY_HEADERS) if report["days"] else "None.\n"
    parts += [days, "## Longest recall\n"]
    if (receipt := report["longest"]) is None:
        parts.append("No node was returned.\n")
    else:
        parts.append(render_markdown_table(list_receipt_facts(receipt), headers=("receipt", receipt["id"])))
        if receipt["jobs"]:
            parts.append(render_markdown_table(list_job_rows(receipt), headers=_JOB_HEADERS))
    return "\n".join([*parts, "## Definitions\n", "".join(f"* {note}\n" for note in _NOTES)])


def render_report_html(report: Document) -> str:
    """Return the report as one self-contained HTML page."""
    broken = " broken" if report["verdict"] == "broken" else ""
    days = (
        render_html_table(_list_day_rows(report), headers=_DAY_HEADERS, name="Days with problems or lost work")
        if report["days"]
        else "<p>None.</p>"
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in _NOTES)
    parts = [
        f'<p class="outcome{broken}">{escape(report["summary"])}</p>\n',
        CHARTS_PLACE,
        render_html_section("Figures", render_html_facts(list_facts(report))),
        render_html_section("Days with problems or lost work", days),
        render_html_section("Longest recall", _render_longest(report["longest"])),
        render_html_section("Definitions", f"<ul>{notes}</ul>"),
    ]
    return render_report_page(
        "".join(parts),
        ChartsData("safety", {"daily": report["daily"]}),
        title=_get_title(report),
        subtitle=_get_period(report),
        generator="ebbtide lending report",
    )


def _render_longest(receipt: Document | None) -> str:
    if receipt is None:
        return "<p>No node was returned.</p>"
    facts = render_html_facts(list_receipt_facts(receipt))
    if not receipt["jobs"]:
        return facts
    return facts + render_html_table(list_job_rows(receipt), headers=_JOB_HEADERS, name="Jobs that left the node")


def _get_title(report: Document) -> str:
    return f"Lending safety of pool {report['pool']}, {report['month']}"


def _get_period(report: Document) -> str:
    period = f"{format_time(report['from_s'])} to {format_time(report['until_s'])} (UTC)"
    return period if report["is_complete"] else f"{period}; the month has not ended"


def _list_day_rows(report: Document) -> list[Sequence[str]]:
    counts = ("late", "lost", "short_intervals")
    return [
        (
            format_time(day["start_s"])[:10],
            *(format_number(day[name]) for name in counts),
            format_number(day["lost_gpu_hours"], 2),
        )
        for day in report["days"]
    ]


def _format_after(at_s: float | None, since_s: float) -> str:
    return "-" if at_s is None else format_duration(at_s - since_s)
