"""`ebbtide webhooks`: manages webhooks and their deliveries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import has_no_subcommand
from cli.output import OutputFormat, OutputOption, format_time, print_document, render_facts, render_table

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="webhooks", help="Manage webhooks and their deliveries.")

WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Webhook ID.")]
CodesOption = Annotated[
    list[str] | None, typer.Option("--code", help="Send only this event code, such as JobStarted. Repeatable.")
]
QueueOption = Annotated[str | None, typer.Option("--queue", help="Send only events of this queue and its jobs.")]
SubjectOption = Annotated[
    str | None, typer.Option("--subject", help="Send only events of this job, node, pool or queue.")
]
DeliveryStateOption = Annotated[
    Literal["", "pending", "delivered", "dead"], typer.Option("--state", help="Show only deliveries in this state.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most deliveries to list, newest first.")]


@app.callback(invoke_without_command=True)
def webhooks(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_webhooks(url, output)


@app.command("list")
def list_webhooks(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the webhooks that you have access to."""
    with service_client(url) as client:
        result = list(client.webhooks())
    print_document(result, output, lambda: _render_webhooks(result))


@app.command("create")
def create_webhook(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URL to send events to.")],
    codes: CodesOption = None,
    queue: QueueOption = None,
    subject: SubjectOption = None,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create a webhook and print its signing secret once. It receives events from now on."""
    event_filter = {"codes": codes, "queue": queue, "subject": subject}
    with service_client(url) as client:
        created = client.create_webhook(
            {"url": target, **{name: value for name, value in event_filter.items() if value}}
        )
    print_document(
        created,
        output,
        lambda: render_facts(_webhook_facts(created) | {"secret": f"{created['secret']} (shown only once)"}),
    )


@app.command("show")
def show_webhook(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Show a webhook's URL, event filter and state."""
    with service_client(url) as client:
        result = client.webhook(webhook)
    print_document(result, output, lambda: render_facts(_webhook_facts(result)))


@app.command("test")
def send_test(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Send a message with the code Test."""
    with service_client(url) as client:
        delivery = client.test_webhook(webhook)
    message = f"{delivery['id']} queued; `ebbtide webhooks deliveries {webhook}` shows its state"
    print_document(delivery, output, lambda: render_facts({"message": message}))


@app.command("deliveries")
def list_deliveries(
    webhook: WebhookArgument,
    state: DeliveryStateOption = "",
    limit: LimitOption = 20,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List past and pending deliveries, newest first."""
    with service_client(url) as client:
        result = list(islice(client.webhook_deliveries(webhook, state=state, limit=min(limit, 100)), limit))
    print_document(result, output, lambda: _render_deliveries(result))


@app.command("redeliver")
def redeliver(
    webhook: WebhookArgument,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="ID of a dead delivery.")],
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Retry a dead delivery."""
    with service_client(url) as client:
        response = client.redeliver(webhook, delivery)
    print_document(
        response, output, lambda: render_facts({"message": f"{delivery} will be retried before later deliveries"})
    )


@app.command("rotate-secret")
def rotate_secret(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Replace the signing secret. For one day messages carry signatures with the old and the new secret."""
    with service_client(url) as client:
        created = client.rotate_webhook_secret(webhook)
    print_document(created, output, lambda: render_facts({"secret": f"{created['secret']} (shown only once)"}))


@app.command("enable")
def enable_webhook(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Enable a disabled webhook. Missed events are delivered first."""
    with service_client(url) as client:
        result = client.change_webhook(webhook, {"enabled": True})
    print_document(result, output, lambda: render_facts(_webhook_facts(result)))


@app.command("delete")
def delete_webhook(
    webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Delete a webhook and its deliveries."""
    with service_client(url) as client:
        client.delete_webhook(webhook)
    print_document({"id": webhook, "deleted": True}, output, lambda: render_facts({"webhook": f"{webhook} deleted"}))


def _webhook_facts(webhook: Mapping[str, Any]) -> dict[str, str]:
    state = "enabled" if webhook["enabled"] else f"disabled: {webhook['disabled_reason'] or 'by its owner'}"
    return {"webhook": webhook["id"], "url": webhook["url"], "events": _format_filter(webhook), "state": state}


def _format_filter(webhook: Mapping[str, Any]) -> str:
    codes = ", ".join(webhook["codes"]) or "all events"
    subjects = [f"{noun} {webhook[noun]}" for noun in ("queue", "subject") if webhook[noun]]
    return f"{codes} of {' and '.join(subjects)}" if subjects else codes


def _render_webhooks(result: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = (
        [each["id"], each["url"], _format_filter(each), "yes" if each["enabled"] else "no", each["owner"]]
        for each in result
    )
    return render_table(rows, headers=["webhook", "url", "events", "enabled", "owner"], empty="There are no webhooks.")


def _render_deliveries(result: Iterable[Mapping[str, Any]]) -> RenderableType:
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
        for each in result
    )
    heads = ["delivery", "event", "subject", "state", "attempts", "ended or next attempt", "last error"]
    return render_table(
        rows, headers=heads, right_aligned=["attempts"], empty="There are no deliveries in the last week."
    )


def _format_delivery_time(delivery: Mapping[str, Any]) -> str:
    return format_time(delivery["ended_at_s"] or delivery["next_at_s"])
