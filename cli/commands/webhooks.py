"""Webhooks of a service: who is told of events, and what became of each message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.commands.fleet import has_no_subcommand
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.output import OutputFormat, OutputOption, format_time, print_document, render_facts, render_table

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="webhooks", help="Have events sent to a URL; see what was delivered, and deliver again.")

WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id of a webhook.")]
CodesOption = Annotated[list[str] | None, typer.Option("--code", help="Only these events (JobStarted ...); repeat it.")]
QueueOption = Annotated[str | None, typer.Option("--queue", help="Only events of this queue and its jobs.")]
SubjectOption = Annotated[str | None, typer.Option("--subject", help="Only events of this job, node, pool or queue.")]
DeliveryStateOption = Annotated[
    Literal["", "pending", "delivered", "dead"], typer.Option("--state", help="Only these.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most deliveries to show, newest first.")]


@app.callback(invoke_without_command=True)
def webhooks(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_webhooks(url, output)


@app.command("list")
def list_webhooks(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the webhooks that you may see."""
    with service_client(url) as client:
        found = list(client.webhooks())
    print_document(found, output, lambda: _render_webhooks(found))


@app.command("create")
def create_webhook(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URL that events are sent to.")],
    codes: CodesOption = None,
    queue: QueueOption = None,
    subject: SubjectOption = None,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Have the events from now on sent to a URL. The secret for checking signatures is shown this once."""
    given = {"codes": codes, "queue": queue, "subject": subject}
    with service_client(url) as client:
        made = client.create_webhook({"url": target, **{name: value for name, value in given.items() if value}})
    print_document(
        made, output, lambda: render_facts(_webhook_facts(made) | {"secret": f"{made['secret']} (shown this once)"})
    )


@app.command("show")
def show_webhook(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """One webhook: where to, what of, and why it is disabled."""
    with service_client(url) as client:
        found = client.webhook(webhook)
    print_document(found, output, lambda: render_facts(_webhook_facts(found)))


@app.command("test")
def send_test(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Have a message of code Test sent."""
    with service_client(url) as client:
        asked = client.test_webhook(webhook)
    said = f"{asked['id']} is to be delivered; `ebbtide webhooks deliveries {webhook}` shows whether it was"
    print_document(asked, output, lambda: render_facts({"message": said}))


@app.command("deliveries")
def list_deliveries(
    webhook: WebhookArgument,
    state: DeliveryStateOption = "",
    limit: LimitOption = 20,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """What was and is to be delivered, newest first."""
    with service_client(url) as client:
        found = list(islice(client.webhook_deliveries(webhook, state=state, limit=min(limit, 100)), limit))
    print_document(found, output, lambda: _render_deliveries(found))


@app.command("redeliver")
def redeliver(
    webhook: WebhookArgument,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="Id of a dead delivery.")],
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Try a dead delivery again."""
    with service_client(url) as client:
        asked = client.redeliver(webhook, delivery)
    print_document(
        asked, output, lambda: render_facts({"message": f"{delivery} is tried again, before all that came later"})
    )


@app.command("rotate-secret")
def rotate_secret(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Make a new secret; for a day messages are signed with the old one as well."""
    with service_client(url) as client:
        made = client.rotate_webhook_secret(webhook)
    print_document(made, output, lambda: render_facts({"secret": f"{made['secret']} (shown this once)"}))


@app.command("enable")
def enable_webhook(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Deliver again, first what was missed meanwhile."""
    with service_client(url) as client:
        found = client.change_webhook(webhook, {"enabled": True})
    print_document(found, output, lambda: render_facts(_webhook_facts(found)))


@app.command("delete")
def delete_webhook(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Send nothing more, and forget what was delivered."""
    with service_client(url) as client:
        client.delete_webhook(webhook)
    print_document({"id": webhook, "deleted": True}, output, lambda: render_facts({"webhook": f"{webhook} is deleted"}))


def _webhook_facts(webhook: Mapping[str, Any]) -> dict[str, str]:
    told = "enabled" if webhook["enabled"] else f"disabled: {webhook['disabled_reason'] or 'by request'}"
    return {"webhook": webhook["id"], "sends to": webhook["url"], "is told of": _format_filter(webhook), "is": told}


def _format_filter(webhook: Mapping[str, Any]) -> str:
    said = ", ".join(webhook["codes"]) or "all events"
    of = [f"{noun} {webhook[noun]}" for noun in ("queue", "subject") if webhook[noun]]
    return f"{said} of {' and '.join(of)}" if of else said


def _render_webhooks(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = (
        [each["id"], each["url"], _format_filter(each), "yes" if each["enabled"] else "no", each["owner"]]
        for each in found
    )
    return render_table(
        rows, headers=["webhook", "sends to", "events", "enabled", "owner"], empty="There are no webhooks."
    )


def _render_deliveries(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = (
        [
            each["id"],
            each["code"],
            each["subject"],
            each["state"],
            str(each["attempts"]),
            _format_delivery_time(each),
            each["error"],
        ]
        for each in found
    )
    heads = ["delivery", "event", "of", "state", "attempts", "ended or next", "last error"]
    return render_table(
        rows, headers=heads, right_aligned=["attempts"], empty="Nothing was delivered in the last week."
    )


def _format_delivery_time(delivery: Mapping[str, Any]) -> str:
    return format_time(delivery["ended_at_s"] or delivery["next_at_s"])
