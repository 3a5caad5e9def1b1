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

from scheduler.cli.failure import Failed, blaming, refuse
from scheduler.cli.humanise import counted, span
from scheduler.cli.output import Format, OutputOption, columns, console, emit, say
from scheduler.cli.simulation_view import comparison
from scheduler.documents.plain import plain

if TYPE_CHECKING:
    from scheduler.policies.policy_set import PolicySet
    from scheduler.simulator.simulate import Inputs

LIST = "list"
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
    output: OutputOption = Format.TABLE,
) -> None:
    """Run policy sets on recorded jobs and demand, and compare what comes of it. Needs no service."""
    if policy == LIST:
        _list_policies(output)
        return
    if jobs is None or cluster is None:
        refuse(f"{'--jobs' if jobs is None else '--cluster'}: a file is needed")
    names, sown = policy_names(policy), sown_seeds(seeds, seed)

    from scheduler.cli.simulation_report import ReportFolder
    from scheduler.documents.throughput import read_profile
    from scheduler.simulator.policy_faults import PolicyError
    from scheduler.simulator.simulate import Options, load_inputs
    from scheduler.simulator.sweep import SweepReport, simulate_seeds
    from scheduler.simulator.truth import parse_truth

    folder = None if report is None else ReportFolder(report)
    with blaming("--truth"):
        hidden = parse_truth(truth)
    with blaming(""):
        measured = tuple(map(read_profile, profiles or ()))
        inputs = load_inputs(jobs, demand, cluster, workload=workload, profiles=measured)
        inputs = replace(inputs, jobs=inputs.jobs[:limit])
        at_once = processes or os.cpu_count() or 1
        with _bar() as tell:
            options = Options(forecast=forecast, truth=hidden, profiles=measured)
            try:
                runs = simulate_seeds(inputs, names, sown, options=options, processes=at_once, progress=tell)
            except PolicyError as wrong:
                raise Failed(str(wrong)) from wrong
            except BrokenProcessPool as died:
                raise Failed("a simulating process was killed, perhaps for want of memory: --processes 1") from died
    for told in dict.fromkeys(f"{one.policy}: {told}" for run in runs for one in run.policies for told in one.violated):
        say(f"illegal decisions of policy {told}")
    document = runs[0].to_json() if seeds is None else SweepReport(runs).to_json()
    if folder is not None:
        asked = {"workload": workload, "forecast": forecast, "truth": truth}
        files = [path.name for path in (jobs, demand, *(profiles or ())) if path is not None]
        folder.write(plain(document), _setting(inputs, files, asked), runs[0].series)
    emit(document, output, lambda: comparison(document))


def _setting(inputs: Inputs, files: Sequence[str], asked: Mapping[str, str]) -> str:
    """What was simulated, in a line for the report."""
    from scheduler.simulator.traces import demand_traces

    pools = (f"{pool.name} {pool.nodes} × {pool.gpus_per_node} {pool.gpu}" for pool in inputs.cluster.pools)
    said = "".join(f"; {name} {value}" for name, value in asked.items() if value)
    period_s = min((trace.period_s for trace in demand_traces(inputs.demand, inputs.cluster)), default=math.inf)
    if period_s < inputs.jobs[-1].submit_time_s:
        said += f"; demand repeated every {span(period_s)}, each time at another level"
    return f"{counted(len(inputs.jobs), 'job')} of {', '.join(files)} on {' + '.join(pools)}{said}"


def sown_seeds(seeds: str | None, first: int) -> tuple[int, ...]:
    """The seeds of both options. Raises BadInput for a sweep that has not two different ones."""
    if seeds is None:
        return (first,)
    try:
        listed = tuple(int(text) for text in seeds.split(","))
    except ValueError:
        listed = (-1,)
    if len(listed) == 1:
        listed = tuple(range(first, first + min(listed[0], _SEEDS_MAX + 1)))
    elif first:
        refuse(f"--seed: {first} does not go with --seeds {seeds}, which names every seed")
    if not 2 <= len(set(listed)) == len(listed) <= _SEEDS_MAX or min(listed) < 0:
        refuse(f"--seeds: got {seeds!r}; allowed: a count of 2 to {_SEEDS_MAX}, or so many different seeds: 1,2,3")
    return listed


def policy_names(text: str) -> tuple[str, ...]:
    """The policy sets of an option. Raises BadInput for one that does not exist or stands there twice."""
    from scheduler.policies.policy_set import policy_set

    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        with blaming("--policy"):
            policy_set(name)
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
    with blaming("--policy"):
        document = [_policy_json(policies) for policies in _all_policies()]
    rows = [[p["name"], _yes(p["lends"]), _yes(p["scales"]), p["summary"], p["paper"]] for p in document]
    emit(document, output, lambda: columns(rows, heads=["policy", "lends", "scales", "what it does", "paper"]))


def _all_policies() -> list[PolicySet]:
    from scheduler.policies.policy_set import policy_set, policy_set_names

    return [policy_set(name) for name in policy_set_names()]


def _policy_json(policies: PolicySet) -> dict[str, Any]:
    return {
        "name": policies.name,
        "lends": policies.lends,
        "scales": policies.scales,
        "summary": policies.summary,
        "paper": policies.paper,
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"
