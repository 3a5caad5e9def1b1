"""`ebbtide queues`: lists and changes queues and their quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_queue_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import has_no_subcommand, parse_count, raise_input_error
from cli.output import OutputFormat, OutputOption, print_document, render_facts, render_table
from scheduler.domain.job_queue import QUOTA_FIELDS, QuotaField, describe_quota, format_quota_value

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="queues", help="List, create, change or delete queues.")

QueueArgument = Annotated[
    str, typer.Argument(metavar="QUEUE", autocompletion=complete_queue_names, help="Name of the queue.")
]


def _quota_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add one option per quota field to a command, which receives the given values as `quota`."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in QUOTA_FIELDS}
        command(**arguments, quota=_collect_quota(given))

    name, *others = [each for each in signature(command, eval_str=True).parameters.values() if each.name != "quota"]
    options = [
        Parameter(declared.name, Parameter.KEYWORD_ONLY, default=None, annotation=_option_type(declared))
        for declared in QUOTA_FIELDS.values()
    ]
    parameters = [name, *options, *(each.replace(kind=Parameter.KEYWORD_ONLY) for each in others)]
    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _option_type(declared: QuotaField) -> Any:
    text = f"{declared.description} `none` removes the limit." if declared.is_optional else declared.description
    return Annotated[(str if declared.is_optional else declared.type) | None, typer.Option(declared.option, help=text)]


@app.callback(invoke_without_command=True)
def queues(context: typer.Context, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    if has_no_subcommand(context):
        list_queues(url, output)


@app.command("list")
def list_queues(url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """List queues with their quotas, usage and pending jobs."""
    with service_client(url) as client:
        result = client.queues()
    print_document(result, output, lambda: render_queues(result))


@app.command("create")
@_quota_options
def create_queue(
    name: QueueArgument,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
    *,
    quota: Mapping[str, Any],
) -> None:
    """Create a queue. Undeclared queues have no guarantee and share the limits of `default`."""
    with service_client(url) as client:
        response = client.create_queue({"name": name, **quota})
    print_document(response, output, lambda: render_facts({"queue": f"{name} created: {describe_quota(response)}"}))


@app.command("set")
@_quota_options
def set_queue(
    name: QueueArgument,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
    *,
    quota: Mapping[str, Any],
) -> None:
    """Change the given fields of a queue."""
    if not quota:
        raise_input_error(f"nothing to change. Set one of {', '.join(each.option for each in QUOTA_FIELDS.values())}")
    with service_client(url) as client:
        response = client.change_queue(name, quota)
    print_document(response, output, lambda: render_facts({"queue": f"{name} changed: {describe_quota(response)}"}))


@app.command("delete")
def delete_queue(name: QueueArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Delete a queue. Its jobs remain, without guarantee and limits."""
    with service_client(url) as client:
        response = client.delete_queue(name)
    print_document(response, output, lambda: render_facts({"queue": f"{name} deleted"}))


def render_queues(result: Iterable[Mapping[str, Any]]) -> RenderableType:
    listed = {name: declared.label for name, declared in QUOTA_FIELDS.items() if declared.is_listed}
    return render_table(
        (
            [
                queue["name"],
                *(format_quota_value(queue[name]) for name in listed),
                str(queue["used_gpus"]),
                str(queue["borrowed_gpus"]),
                str(queue["running_jobs"]),
                f"{queue['waiting_jobs']} for {queue['waiting_gpus']} GPUs" if queue["waiting_jobs"] else "-",
                "" if queue["declared"] else "not created",
            ]
            for queue in result
        ),
        headers=["queue", *listed.values(), "used", "borrowed", "running", "pending", ""],
        right_aligned=[*listed.values(), "used", "borrowed", "running"],
        empty="There are no queues.",
    )


def _collect_quota(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quota fields that were given. The service validates them."""
    return {name: _parse_quota_value(QUOTA_FIELDS[name], value) for name, value in given.items() if value is not None}


def _parse_quota_value(declared: QuotaField, value: Any) -> Any:
    if not declared.is_optional:
        return value
    return None if value == "none" else parse_count(declared.option, value, minimum=0)
