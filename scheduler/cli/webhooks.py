"""Webhooks of a service: who is told of events, and what became of each message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scheduler.cli.fleet import is_list
from scheduler.cli.humanise import clock
from scheduler.cli.output import Format, OutputOption, columns, emit, facts
from scheduler.cli.service import DEFAULT_URL, UrlOption, service

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(name="webhooks", help="Have events sent to a URL; see what was delivered, and deliver again.")

WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id of a webhook.")]
CodesOption = Annotated[list[str] | None, typer.Option("--code", help="Only these events (JobStarted ...); repeat it.")]
QueueOption = Annotated[str | None, typer.Option("--queue", help="Only events of this queue and its jobs.")]
SubjectOption = Annotated[str | None, typer.Option("--subject", help="Only events of this job, node, pool or queue.")]
StateOption = Annotated[Literal["", "pending", "delivered", "dead"], typer.Option("--state", help="Only these.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most deliveries to show, newest first.")]


@app.callback(invoke_without_command=True)
def webhooks(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    if is_list(context):
        list_webhooks(url, output)


@app.command("list")
def list_webhooks(url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """List the webhooks that you may see."""
    with service(url) as client:
        found = list(client.webhooks())
    emit(found, output, lambda: _webhook_rows(found))


@app.command("create")
def create_webhook(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URL that events are sent to.")],
    codes: CodesOption = None,
    queue: QueueOption = None,
    subject: SubjectOption = None,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Have the events from now on sent to a URL. The secret for checking signatures is shown this once."""
    given = {"codes": codes, "queue": queue, "subject": subject}
    with service(url) as client:
        made = client.create_webhook({"url": target, **{name: value for name, value in given.items() if value}})
    emit(made, output, lambda: facts(_facts(made) | {"secret": f"{made['secret']} (shown this once)"}))


@app.command("show")
def show_webhook(webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """One webhook: where to, what of, and why it is disabled."""
    with service(url) as client:
        found = client.webhook(webhook)
    emit(found, output, lambda: facts(_facts(found)))


@app.command("test")
def send_test(webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Have a message of code Test sent."""
    with service(url) as client:
        asked = client.test_webhook(webhook)
    said = f"{asked['id']} is to be delivered; `ebbtide webhooks deliveries {webhook}` shows whether it was"
    emit(asked, output, lambda: facts({"message": said}))


@app.command("deliveries")
def list_deliveries(
    webhook: WebhookArgument,
    state: StateOption = "",
    limit: LimitOption = 20,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """What was and is to be delivered, newest first."""
    with service(url) as client:
        found = list(islice(client.webhook_deliveries(webhook, state=state, limit=min(limit, 100)), limit))
    emit(found, output, lambda: _delivery_rows(found))


@app.command("redeliver")
def redeliver(
    webhook: WebhookArgument,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="Id of a dead delivery.")],
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Try a dead delivery again."""
    with service(url) as client:
        asked = client.redeliver(webhook, delivery)
    emit(asked, output, lambda: facts({"message": f"{delivery} is tried again, before all that came later"}))


@app.command("rotate-secret")
def rotate_secret(webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Make a new secret; for a day messages are signed with the old one as well."""
    with service(url) as client:
        made = client.rotate_webhook_secret(webhook)
    emit(made, output, lambda: facts({"secret": f"{made['secret']} (shown this once)"}))


@app.command("enable")
def enable_webhook(webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Deliver again, first what was missed meanwhile."""
    with service(url) as client:
        found = client.change_webhook(webhook, {"enabled": True})
    emit(found, output, lambda: facts(_facts(found)))


@app.command("delete")
def delete_webhook(webhook: WebhookArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = Format.TABLE) -> None:
    """Send nothing more, and forget what was delivered."""
    with service(url) as client:
        client.delete_webhook(webhook)
    emit({"id": webhook, "deleted": True}, output, lambda: facts({"webhook": f"{webhook} is deleted"}))


def _facts(webhook: Mapping[str, Any]) -> dict[str, str]:
    told = "enabled" if webhook["enabled"] else f"disabled: {webhook['disabled_reason'] or 'by request'}"
    return {"webhook": webhook["id"], "sends to": webhook["url"], "is told of": _events(webhook), "is": told}


def _events(webhook: Mapping[str, Any]) -> str:
    said = ", ".join(webhook["codes"]) or "all events"
    of = [f"{noun} {webhook[noun]}" for noun in ("queue", "subject") if webhook[noun]]
    return f"{said} of {' and '.join(of)}" if of else said


def _webhook_rows(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = (
        [each["id"], each["url"], _events(each), "yes" if each["enabled"] else "no", each["owner"]] for each in found
    )
    return columns(rows, heads=["webhook", "sends to", "events", "enabled", "owner"], empty="There are no webhooks.")


def _delivery_rows(found: Iterable[Mapping[str, Any]]) -> RenderableType:
    rows = (
        [each["id"], each["code"], each["subject"], each["state"], str(each["attempts"]), _when(each), each["error"]]
        for each in found
    )
    heads = ["delivery", "event", "of", "state", "attempts", "ended or next", "last error"]
    return columns(rows, heads=heads, right=["attempts"], empty="Nothing was delivered in the last week.")


def _when(delivery: Mapping[str, Any]) -> str:
    return clock(delivery["ended_at_s"] or delivery["next_at_s"])
