"""`simulate`: whole policy sets on recorded jobs and demand, on a virtual clock."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.inputs import CommandError, input_errors_from, raise_input_error
from cli.output import (
    OutputFormat,
    OutputOption,
    format_count,
    format_duration,
    make_console,
    print_document,
    print_message,
    render_table,
)
from cli.simulation.comparison_table import render_comparison
from scheduler.documents.plain_json import to_plain_json

if TYPE_CHECKING:
    from scheduler.scheduling.policies.policy_set import PolicySet
    from scheduler.simulator.simulate import SimulationInputs


LIST_POLICIES = "list"
_SEEDS_MAX = 1_000

JobsOption = Annotated[Path | None, typer.Option("--jobs", metavar="JOBS.csv[.gz]", help="The jobs' trace.")]
DemandOption = Annotated[Path | None, typer.Option("--demand", metavar="DEMAND.csv[.gz]", help="Inference demand.")]
ClusterOption = Annotated[Path | None, typer.Option("--cluster", metavar="CLUSTER.yaml", help="The cluster.")]
WorkloadOption = Annotated[
    str, typer.Option("--workload", metavar="NAME", help="One workload of a jobs' trace that has several.")
]
ProfilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--profiles",
        metavar="FILE.csv[.gz]",
        help="Measured throughput, which goes before the solver's: of ElasticFlow, Pollux or Rubick. May be repeated.",
    ),
]
PolicyOption = Annotated[
    str, typer.Option("--policy", metavar="NAME[,NAME...]", help="Policy sets; `list` shows them.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
SeedsOption = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        metavar="COUNT|SEED,SEED,...",
        help="A sweep: so many seeds from --seed on, or these; figures get 95% confidence intervals.",
    ),
]
ForecastOption = Annotated[
    Literal["seasonal", "oracle"], typer.Option("--forecast", help="Of demand; `oracle` knows what is to come.")
]
TruthOption = Annotated[
    str,
    typer.Option(
        "--truth",
        metavar="models,error=0.15,duration=0.5",
        help="What policies are not told: models by size, speeds off their curves, lengths off what was declared.",
    ),
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", min=1, help="Simulations at once.", show_default="one a core")
]
ReportOption = Annotated[
    str | None,
    typer.Option("--report", metavar="FOLDER", help="Also write report.html, .md, .json and pictures there."),
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many jobs.")]


def simulate(
    *,
    jobs: JobsOption = None,
    demand: DemandOption = None,
    cluster: ClusterOption = None,
    workload: WorkloadOption = "",
    profiles: ProfilesOption = None,
    policy: PolicyOption = "ebbtide",
    seed: SeedOption = 0,
    seeds: SeedsOption = None,
    forecast: ForecastOption = "seasonal",
    truth: TruthOption = "",
    limit: LimitOption = None,
    processes: ProcessesOption = None,
    report: ReportOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run policy sets on recorded jobs and demand, and compare what comes of it. Needs no service."""
    if policy == LIST_POLICIES:
        _list_policies(output)
        return
    if jobs is None or cluster is None:
        raise_input_error(f"{'--jobs' if jobs is None else '--cluster'}: a file is needed")
    names, sown = parse_policies(policy), parse_seeds(seeds, seed)

    from cli.simulation.report import ReportFolder
    from scheduler.documents.throughput import read_throughput
    from scheduler.simulator.ground_truth import parse_ground_truth
    from scheduler.simulator.seed_sweep import SweepReport, simulate_seeds
    from scheduler.simulator.simulate import PolicyError, SimulationOptions, load_inputs

    folder = None if report is None else ReportFolder(report)
    with input_errors_from("--truth"):
        hidden = parse_ground_truth(truth)
    with input_errors_from(""):
        measured = tuple(map(read_throughput, profiles or ()))
        inputs = load_inputs(jobs, demand, cluster, workload=workload, profiles=measured)
        inputs = replace(inputs, jobs=inputs.jobs[:limit])
        at_once = processes or os.cpu_count() or 1
        with _progress_bar() as tell:
            options = SimulationOptions(forecast=forecast, truth=hidden, profiles=measured)
            try:
                runs = simulate_seeds(inputs, names, sown, options=options, processes=at_once, progress=tell)
            except PolicyError as wrong:
                raise CommandError(str(wrong)) from wrong
            except BrokenProcessPool as died:
                raise CommandError(
                    "a simulating process was killed, perhaps for want of memory: --processes 1"
                ) from died
    for told in dict.fromkeys(f"{one.policy}: {told}" for run in runs for one in run.policies for told in one.violated):
        print_message(f"illegal decisions of policy {told}")
    document = runs[0].to_json() if seeds is None else SweepReport(runs).to_json()
    if folder is not None:
        asked = {"workload": workload, "forecast": forecast, "truth": truth}
        files = [path.name for path in (jobs, demand, *(profiles or ())) if path is not None]
        folder.write(to_plain_json(document), _describe_setting(inputs, files, asked), runs[0].series)
    print_document(document, output, lambda: render_comparison(document))


def _describe_setting(inputs: SimulationInputs, files: Sequence[str], options_given: Mapping[str, str]) -> str:
    """What was simulated, in a line for the report."""
    from scheduler.simulator.demand import build_demand_traces

    pools = (f"{pool.name} {pool.nodes} × {pool.gpus_per_node} {pool.gpu}" for pool in inputs.cluster.pools)
    said = "".join(f"; {name} {value}" for name, value in options_given.items() if value)
    period_s = min((trace.period_s for trace in build_demand_traces(inputs.demand, inputs.cluster)), default=math.inf)
    if period_s < inputs.jobs[-1].submit_time_s:
        said += f"; demand repeated every {format_duration(period_s)}, each time at another level"
    return f"{format_count(len(inputs.jobs), 'job')} of {', '.join(files)} on {' + '.join(pools)}{said}"


def parse_seeds(seeds: str | None, first_seed: int) -> tuple[int, ...]:
    """The seeds of both options. Raises BadInput for a sweep that has not two different ones."""
    if seeds is None:
        return (first_seed,)
    try:
        listed = tuple(int(text) for text in seeds.split(","))
    except ValueError:
        listed = (-1,)
    if len(listed) == 1:
        listed = tuple(range(first_seed, first_seed + min(listed[0], _SEEDS_MAX + 1)))
    elif first_seed:
        raise_input_error(f"--seed: {first_seed} does not go with --seeds {seeds}, which names every seed")
    if not 2 <= len(set(listed)) == len(listed) <= _SEEDS_MAX or min(listed) < 0:
        raise_input_error(
            f"--seeds: got {seeds!r}; allowed: a count of 2 to {_SEEDS_MAX}, or so many different seeds: 1,2,3"
        )
    return listed


def parse_policies(text: str) -> tuple[str, ...]:
    """The policy sets of an option. Raises BadInput for one that does not exist or stands there twice."""
    from scheduler.scheduling.policies.policy_set import load_policy_set

    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        with input_errors_from("--policy"):
            load_policy_set(name)
        if names.count(name) > 1:
            raise_input_error(f"--policy: {name!r} is named {names.count(name)} times; allowed is once")
    return names


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, where that is a terminal, and gone when it is done; gives what moves it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("jobs"), TimeRemainingColumn())
    screen = make_console(stderr=True)
    with Progress(*parts, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("simulating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _list_policies(output: OutputFormat) -> None:
    with input_errors_from("--policy"):
        document = [_policy_to_json(policies) for policies in _load_policies()]
    rows = [
        [p["name"], _format_yes_no(p["lends"]), _format_yes_no(p["scales"]), p["summary"], p["paper"]] for p in document
    ]
    print_document(
        document, output, lambda: render_table(rows, headers=["policy", "lends", "scales", "what it does", "paper"])
    )


def _load_policies() -> list[PolicySet]:
    from scheduler.scheduling.policies.policy_set import list_policy_sets, load_policy_set

    return [load_policy_set(name) for name in list_policy_sets()]


def _policy_to_json(policies: PolicySet) -> dict[str, Any]:
    return {
        "name": policies.name,
        "lends": policies.lends,
        "scales": policies.scales,
        "summary": policies.summary,
        "paper": policies.paper,
    }


def _format_yes_no(value: bool) -> str:
    return "yes" if value else "no"
