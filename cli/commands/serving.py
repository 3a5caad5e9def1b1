"""`ebbtide serving`: sizes inference pools, sets the models that they serve, and chooses length classes."""

from __future__ import annotations

from collections import Counter
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.commands.fleet import PoolArgument
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.inputs import input_errors_from, raise_input_error, read_yaml_object
from cli.output import OutputFormat, OutputOption, format_number, print_document, render_facts

app = typer.Typer(name="serving", help="Size inference pools from requests.", no_args_is_help=True)

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="Model, GPU, objective, limits and measurements.")]
FilesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE...", help="Documents of the models, as for `size`. None: the pool serves no models."),
]
RatesOption = Annotated[
    list[str],
    typer.Option("--rate", metavar="MODEL=RATE", help="Requests per second of one model. Repeat it for each."),
]
RateOption = Annotated[float, typer.Option("--rate", min=1e-6, max=1e9, help="Requests per second.")]
PairsOption = Annotated[
    str,
    typer.Option(
        "--lengths",
        metavar="FILE.csv",
        help="Columns `prompt`, `output` and, optionally, `requests`. Default: the lengths in FILE.",
    ),
]
BurstinessOption = Annotated[
    float,
    typer.Option(
        "--burstiness",
        min=0.01,
        max=100.0,
        help="Squared coefficient of variation of the times between requests. 1: Poisson.",
    ),
]
LengthsOption = Annotated[
    str, typer.Option("--lengths", metavar="FILE", help="Length in tokens of one request a line.")
]
ClassesOption = Annotated[int, typer.Option("--classes", min=1, max=1_000, help="Largest number of runtimes.")]
LongestOption = Annotated[
    int, typer.Option("--longest", min=0, help="Length that the last class must take. Default: the longest request.")
]
OverheadOption = Annotated[
    int, typer.Option("--overhead", min=0, help="Cost of a request besides its own tokens, in tokens.")
]
ReplicasOption = Annotated[int, typer.Option("--replicas", min=0, help="Replicas to split over the classes.")]


@app.command("size")
def size(
    *,
    file: FileArgument,
    rate: RateOption,
    lengths: PairsOption = "",
    burstiness: BurstinessOption = 1.0,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Find the smallest pool that serves requests within a latency objective."""
    from cli.planning.serving import build_mix, build_objective, build_replica, render_size, to_size_document
    from scheduler.documents.document import parse_document
    from scheduler.documents.serving import ServingModelDocument
    from scheduler.serving.capacity import size_pool

    with input_errors_from(file):
        document = parse_document(ServingModelDocument, read_yaml_object(file))
    mix = build_mix(document, lengths, rate, burstiness)
    replica, fitted = build_replica(document, file)
    objective = build_objective(document)
    with input_errors_from(file):
        capacity = size_pool(mix, replica, objective)
    print_document(
        to_size_document(capacity, replica, fitted), output, lambda: render_size(capacity, objective, fitted)
    )


@app.command("set")
def set_models(
    pool: PoolArgument,
    files: FilesArgument = None,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Replace the models that an inference pool serves."""
    models = [read_yaml_object(file) for file in files or ()]
    with service_client(url) as client:
        response = client.set_served_models(pool, models)
    names = ", ".join(each["model"] for each in response["serving"]) or "no models"
    print_document(response, output, lambda: render_facts({"pool": f"{pool} serves {names}"}))


@app.command("report")
def report(
    pool: PoolArgument,
    rates: RatesOption,
    *,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Report the requests for the models of a pool as its demand."""
    requests = [_parse_rate(text) for text in rates]
    with service_client(url) as client:
        response = client.report_requests(pool, requests)
    shown = f"{format_number(response['asked_gpus'])} GPUs for these requests"
    print_document(response, output, lambda: render_facts({"demand": shown}))


def _parse_rate(text: str) -> dict[str, Any]:
    """Return a request of the report. Raises InputError unless the text is MODEL=RATE."""
    model, _, number = text.rpartition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = nan
    if not (model and isfinite(rate)):
        raise_input_error(
            f"--rate: {text!r} is not a model and its requests per second. Use MODEL=RATE, such as llama-3-8b=60."
        )
    return {"model": model, "rate": rate}


@app.command("advise")
def advise(pool: PoolArgument, url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the replicas that the requests of a pool need, and those proposed."""
    from cli.planning.serving import render_advice

    with service_client(url) as client:
        result = client.pool(pool)
    print_document({"pool": pool, "models": result.get("serving", [])}, output, lambda: render_advice(result))


@app.command("classes")
def classes(
    *,
    lengths: LengthsOption,
    count: ClassesOption = 8,
    longest: LongestOption = 0,
    overhead: OverheadOption = 0,
    replicas: ReplicasOption = 0,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Choose the maximum lengths of runtimes that pad requests, with the least padding."""
    from cli.planning.serving import render_classes, to_classes_document
    from scheduler.serving.length_classes import choose_length_classes, split_replicas
    from scheduler.solver.lengths.histogram import read_lengths

    with input_errors_from(""):
        counts = Counter(read_lengths(Path(lengths)))
        weights = {tokens: float(number) for tokens, number in counts.items()}
        found = choose_length_classes(weights, count, longest=longest, cost_of=lambda tokens: overhead + tokens)
        loads = [each.cost for each in found.classes]
        split = split_replicas(loads, replicas) if replicas else ()
    document = to_classes_document(found)
    if split:
        rows = zip(document["classes"], split, strict=True)
        document["classes"] = [{**row, "replicas": number} for row, number in rows]
    print_document(document, output, lambda: render_classes(document, split))
