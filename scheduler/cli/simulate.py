"""`simulate`: whole policy sets on recorded jobs and demand, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.failure import blaming, refuse
from scheduler.cli.output import Format, OutputOption, columns, console, emit
from scheduler.cli.simulation_view import comparison

if TYPE_CHECKING:
    from scheduler.policies.policy_set import PolicySet

LIST = "list"

JobsOption = Annotated[Path | None, typer.Option("--jobs", metavar="JOBS.csv[.gz]", help="The jobs' trace.")]
DemandOption = Annotated[Path | None, typer.Option("--demand", metavar="DEMAND.csv[.gz]", help="Inference demand.")]
ClusterOption = Annotated[Path | None, typer.Option("--cluster", metavar="CLUSTER.yaml", help="The cluster.")]
PolicyOption = Annotated[
    str, typer.Option("--policy", metavar="NAME[,NAME...]", help="Policy sets; `list` shows them.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many jobs.")]


def simulate(
    *,
    jobs: JobsOption = None,
    demand: DemandOption = None,
    cluster: ClusterOption = None,
    policy: PolicyOption = "ebbtide",
    seed: SeedOption = 0,
    limit: LimitOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Run policy sets on recorded jobs and demand, and compare what comes of it. Needs no service."""
    if policy == LIST:
        _list_policies(output)
        return
    if jobs is None or demand is None or cluster is None:
        given = {"--jobs": jobs, "--demand": demand, "--cluster": cluster}
        refuse(f"{next(option for option, path in given.items() if path is None)}: a file is needed")
    names = policy_names(policy)

    from scheduler.simulator.simulate import load_inputs
    from scheduler.simulator.simulate import simulate as play

    with blaming(""):
        inputs = load_inputs(jobs, demand, cluster)
        with _bar() as tell:
            rows = inputs.jobs[:limit]
            report = play(rows, inputs.demand, inputs.cluster, ",".join(names), seed=seed, progress=tell)
    document = report.to_json()
    emit(document, output, lambda: comparison(document))


def policy_names(text: str) -> tuple[str, ...]:
    """The policy sets of an option. Raises BadInput for one that does not exist or stands there twice."""
    from scheduler.policies.policy_set import policy_set

    names = tuple(name.strip() for name in text.split(","))
    with blaming("--policy"):
        for name in names:
            policy_set(name)
    for name in names:
        if names.count(name) > 1:
            refuse(f"--policy: {name!r} is named {names.count(name)} times; allowed is once")
    return names


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, where that is a terminal, and gone when it is done; gives what moves it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("jobs"), TimeRemainingColumn())
    screen = console(stderr=True)
    with Progress(*parts, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("simulating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _list_policies(output: Format) -> None:
    document = [_policy_json(policies) for policies in _all_policies()]
    rows = [[p["name"], _yes(p["lends"]), _yes(p["scales"]), p["summary"]] for p in document]
    emit(document, output, lambda: columns(rows, heads=["policy", "lends", "scales", "what it does"]))


def _all_policies() -> list[PolicySet]:
    from scheduler.policies.policy_set import policy_set, policy_set_names

    return [policy_set(name) for name in policy_set_names()]


def _policy_json(policies: PolicySet) -> dict[str, Any]:
    return {
        "name": policies.name,
        "lends": policies.lends,
        "scales": policies.scales,
        "summary": policies.summary,
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"
