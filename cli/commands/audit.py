"""`ebbtide audit`: lists the log of changes, and verifies its hash chain."""

from __future__ import annotations

import time
from itertools import islice
from typing import Annotated

import typer

from cli.commands.events import LimitOption
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import CommandError
from cli.inputs import has_no_subcommand
from cli.output import OutputFormat, OutputOption, format_time, print_document, render_facts, render_table

app = typer.Typer(name="audit", help="List or verify the audit log (admins only).")

ActorOption = Annotated[str, typer.Option("--actor", help="Show only changes by callers of this name.")]
ActorIdOption = Annotated[
    str, typer.Option("--actor-id", help="Show only changes by the caller of this id, such as token:tok-3f9c.")
]
SubjectOption = Annotated[
    str, typer.Option("--subject", help="Show only changes of this job, node, pool, queue or token.")
]
HoursOption = Annotated[float | None, typer.Option("--hours", min=0, help="Show only the last this many hours.")]


@app.callback(invoke_without_command=True)
def audit(
    context: typer.Context,
    actor: ActorOption = "",
    actor_id: ActorIdOption = "",
    subject: SubjectOption = "",
    hours: HoursOption = None,
    *,
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the audit log (admins only). Entries are listed oldest first."""
    if not has_no_subcommand(context):
        return
    since_s = None if hours is None else time.time() - hours * 3600.0
    with service_client(url) as client:
        newest = client.audit(
            actor=actor, actor_id=actor_id, subject=subject, since_s=since_s, order="newest", limit=min(limit, 1000)
        )
        result = list(islice(newest, limit))[::-1]
    print_document(
        result,
        output,
        lambda: render_table(
            (
                [
                    format_time(each["at_s"]),
                    each["actor"],
                    each["action"],
                    each["subject"],
                    each["outcome"],
                    each["request_id"],
                ]
                for each in result
            ),
            headers=["time (UTC)", "actor", "action", "subject", "outcome", "request"],
            empty="The audit log is empty.",
        ),
    )


DigestOption = Annotated[
    str, typer.Option("--digest", help="Digest of an earlier verification, which the log must still contain.")
]


@app.command("verify")
def verify(digest: DigestOption = "", url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Check that no entry was changed, removed, inserted or moved. Needs the setting EBBTIDE_AUDIT_CHAIN.

    Keep the printed digest elsewhere: with --digest, a later call also finds a log that was replaced as a whole.
    """
    with service_client(url) as client:
        report = client.verify_audit(digest)
    facts = {
        "entries": f"{report['entries']} with a digest, {report['first_number']} to {report['last_number']}",
        "digest": report["digest"] or "none",
        **{f"entry {each['number']}": each["problem"] for each in report["problems"]},
    }
    print_document(report, output, lambda: render_facts(facts))
    if not report["chained"]:
        raise CommandError("the audit log has no digests. Set EBBTIDE_AUDIT_CHAIN=true for all processes")
    if report["problems"]:
        raise CommandError(f"the audit log was tampered with: {len(report['problems'])} problems")
