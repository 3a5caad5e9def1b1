"""`ebbtide simulate`: compares policy sets on a trace of jobs and demand, on a virtual clock."""

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

from cli.exit_codes import CommandError
from cli.inputs import input_errors_from, raise_input_error
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
    from scheduler.scheduling.policy_sets import PolicySet
    from scheduler.simulator.simulate import SimulationInputs


LIST_POLICIES = "list"
_SEEDS_MAX = 1_000

JobsOption = Annotated[
    Path | None, typer.Option("--jobs", metavar="JOBS.csv[.gz]", help="CSV file of the jobs to submit, one per row.")
]
DemandOption = Annotated[
    Path | None,
    typer.Option("--demand", metavar="DEMAND.csv[.gz]", help="CSV file of the GPUs that inference needs over time."),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="CLUSTER.yaml", help="YAML file of the pools, nodes and queues to simulate."),
]
WorkloadOption = Annotated[
    str, typer.Option("--workload", metavar="NAME", help="Workload to use, for a trace with several.")
]
ProfilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--profiles",
        metavar="FILE.csv[.gz]",
        help="Measured throughput (ElasticFlow, Pollux or Rubick), used instead of the solver's. Repeatable.",
    ),
]
PolicyOption = Annotated[
    str, typer.Option("--policy", metavar="NAME[,NAME...]", help="Policy sets to compare; `list` lists them.")
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Start value of the random numbers; the same one repeats a run.")
]
SeedsOption = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        metavar="COUNT|SEED,SEED,...",
        help="Number of seeds, counted from --seed, or a list of seeds. Adds 95% confidence intervals.",
    ),
]
ForecastOption = Annotated[
    Literal["combined", "seasonal", "persistence", "oracle"],
    typer.Option("--forecast", help="Demand forecast; `combined` is the service's, `oracle` knows the future."),
]
TruthOption = Annotated[
    str,
    typer.Option(
        "--truth",
        metavar="models,error=0.15,duration=0.5",
        help="Hide facts from policies: models by size, errors of speed curves and of declared durations, and rates of "
        "the hardware relative to its profile: compute=0.7, network=0.125, slow-node=0.8.",
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", min=1, help="Number of simulations to run at once.", show_default="one per core"),
]
ReportOption = Annotated[
    str | None,
    typer.Option(
        "--report",
        metavar="FOLDER",
        help="Also write report.html, .md and .json to this folder, and the charts as PNG files (extra 'plot').",
    ),
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Use only this many jobs, from the first.")]


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
    forecast: ForecastOption = "combined",
    truth: TruthOption = "",
    limit: LimitOption = None,
    processes: ProcessesOption = None,
    report: ReportOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Compare scheduling policies on a trace. Runs each policy set on recorded jobs and demand."""
    if policy == LIST_POLICIES:
        _list_policies(output)
        return
    if jobs is None or cluster is None:
        raise_input_error(f"{'--jobs' if jobs is None else '--cluster'}: a file is required")
    policy_names, seed_list = parse_policies(policy), parse_seeds(seeds, seed)

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
        with _progress_bar() as report_progress:
            options = SimulationOptions(forecast=forecast, truth=hidden, profiles=measured)
            try:
                runs = simulate_seeds(
                    inputs, policy_names, seed_list, options=options, processes=at_once, progress=report_progress
                )
            except PolicyError as error:
                raise CommandError(str(error)) from error
            except BrokenProcessPool as error:
                raise CommandError("a simulation process was killed. If memory ran out, use --processes 1.") from error
    for violation in dict.fromkeys(
        f"{one.policy}: {violation}" for run in runs for one in run.policies for violation in one.violated
    ):
        print_message(f"illegal decisions of policy {violation}")
    document = runs[0].to_json() if seeds is None else SweepReport(runs).to_json()
    if folder is not None:
        options_given = {"workload": workload, "forecast": forecast, "truth": truth}
        files = [path.name for path in (jobs, demand, *(profiles or ())) if path is not None]
        folder.write(to_plain_json(document), _describe_setting(inputs, files, options_given), runs[0].series)
    print_document(document, output, lambda: render_comparison(document))


def _describe_setting(inputs: SimulationInputs, files: Sequence[str], options_given: Mapping[str, str]) -> str:
    """Return one line on the simulation's inputs for the report."""
    from scheduler.simulator.demand import build_demand_traces

    pools = (f"{pool.name} {pool.nodes} × {pool.gpus_per_node} {pool.gpu}" for pool in inputs.cluster.pools)
    suffix = "".join(f"; {name} {value}" for name, value in options_given.items() if value)
    period_s = min((trace.period_s for trace in build_demand_traces(inputs.demand, inputs.cluster)), default=math.inf)
    if period_s < inputs.jobs[-1].submit_time_s:
        suffix += f"; demand repeats every {format_duration(period_s)} at varying levels"
    return f"{format_count(len(inputs.jobs), 'job')} of {', '.join(files)} on {' + '.join(pools)}{suffix}"


def parse_seeds(seeds: str | None, first_seed: int) -> tuple[int, ...]:
    """Return the seeds that both options describe. Raises InputError for a sweep without two different seeds."""
    if seeds is None:
        return (first_seed,)
    try:
        listed = tuple(int(text) for text in seeds.split(","))
    except ValueError:
        listed = (-1,)
    if len(listed) == 1:
        listed = tuple(range(first_seed, first_seed + min(listed[0], _SEEDS_MAX + 1)))
    elif first_seed:
        raise_input_error(f"--seed: {first_seed} cannot be combined with the list --seeds {seeds}")
    if not 2 <= len(set(listed)) == len(listed) <= _SEEDS_MAX or min(listed) < 0:
        raise_input_error(
            f"--seeds: {seeds!r} is invalid. Use a count from 2 to {_SEEDS_MAX} or a list of different seeds: 1,2,3."
        )
    return listed


def parse_policies(text: str) -> tuple[str, ...]:
    """Return the names of the policy sets. Raises InputError for an unknown or repeated name."""
    from scheduler.scheduling.policy_sets import load_policy_set

    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        with input_errors_from("--policy"):
            load_policy_set(name)
        if names.count(name) > 1:
            raise_input_error(f"--policy: {name!r} is listed {names.count(name)} times. List it once.")
    return names


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal. Yields the function that updates it: (done, total)."""
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
        document, output, lambda: render_table(rows, headers=["policy", "lends", "scales", "description", "paper"])
    )


def _load_policies() -> list[PolicySet]:
    from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set

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
