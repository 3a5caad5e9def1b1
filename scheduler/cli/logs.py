"""What the ranks of a job print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from scheduler.cli.jobs import JobArgument
from scheduler.cli.output import Format, OutputOption, emit, facts
from scheduler.cli.service import DEFAULT_URL, UrlOption, service
from scheduler.cli.watching import FollowOption, pour

RankOption = Annotated[int, typer.Option("--rank", min=0, help="Whose lines.")]
TailOption = Annotated[int | None, typer.Option("--tail", min=0, help="Only the last so many lines.")]
GenerationOption = Annotated[
    int | None, typer.Option("--generation", min=1, help="Of these workers; default: the newest.", show_default=False)
]


def logs(
    job: JobArgument,
    follow: FollowOption = False,
    *,
    rank: RankOption = 0,
    tail: TailOption = None,
    generation: GenerationOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = Format.TABLE,
) -> None:
    """Print what a rank of a job has printed; with -f go on until the job has ended."""
    with service(url) as client:
        read = client.follow_logs if follow else client.logs
        lines = read(job, rank=rank, generation=generation, tail=tail)
        if output is Format.TABLE or follow:
            pour(lines, output, _text)
            return
        found = list(lines)
    emit(found, output, lambda: facts({}))


def _text(line: Mapping[str, Any]) -> str:
    return str(line["text"])
