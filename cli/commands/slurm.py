"""`ebbtide slurm`: submits, lists and cancels Slurm jobs whose tasks are node agents."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.identity import parse_duration
from cli.completion import complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, resolve_target, service_client
from cli.exit_codes import CommandError, InputError
from cli.output import (
    OutputFormat,
    OutputOption,
    format_time,
    print_document,
    print_message,
    render_facts,
    render_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scheduler.slurm.pilot_demand import PilotLimits, PilotProposal
    from scheduler.slurm.pilot_script import PilotJob
    from scheduler.slurm.slurm_client import SlurmJob

app = typer.Typer(name="slurm", help="Submit, list or cancel Slurm jobs that run node agents.", no_args_is_help=True)

PoolOption = Annotated[
    str, typer.Option("--pool", autocompletion=complete_pool_names, help="Existing pool that the nodes join.")
]
NodesOption = Annotated[int, typer.Option("--nodes", "-N", min=1, help="Nodes of the Slurm job.")]
PartitionOption = Annotated[str, typer.Option("--partition", "-p", help="Partition. Default: Slurm's.")]
TimeOption = Annotated[str, typer.Option("--time", "-t", help="Time limit, as `sbatch --time` takes it.")]
GpusOption = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs on each node. 0: Slurm has none.")]
NodeGpusOption = Annotated[
    int, typer.Option("--gpus-per-node", min=1, help="GPUs that each new node has and Slurm allocates.")
]
SbatchOption = Annotated[
    list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="Further option of sbatch. Repeatable.")
]
CommandOption = Annotated[
    str, typer.Option("--command", help="Path of `ebbtide` on the nodes. Default: this installation.")
]
LogOption = Annotated[str, typer.Option("--log", help="File of the agents' output, as `sbatch --output` takes it.")]
JoinUrlOption = Annotated[
    str, typer.Option("--join", metavar="URL", help="Control plane for the nodes. Default: that of this command.")
]
ExpiresOption = Annotated[
    str, typer.Option("--token-expires", metavar="TIME", help="How long the job may be pending, at most 7d.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")]
AgentArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- AGENT OPTIONS]", help="Options of `ebbtide agent` on the nodes.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Slurm job, as listed by `ebbtide slurm list`.")]
NodesMaxOption = Annotated[
    int, typer.Option("--nodes-max", min=1, help="Most nodes of your pilots in this pool, pending ones included.")
]
SubmitOption = Annotated[bool, typer.Option("--submit", help="Submit the nodes. Default: only propose them.")]
GpuModelOption = Annotated[
    str, typer.Option("--gpu", metavar="MODEL", help="GPU model of new nodes. Default: that of the pool's nodes.")
]
IntervalOption = Annotated[str, typer.Option("--every", metavar="TIME", help="Time between two looks.")]
OnceOption = Annotated[bool, typer.Option("--once", help="Look once and exit.")]


@app.command("submit")
def submit(
    *,
    pool: PoolOption,
    nodes: NodesOption = 1,
    partition: PartitionOption = "",
    time_limit: TimeOption = "",
    gpus_per_node: GpusOption = 0,
    sbatch: SbatchOption = None,
    command: CommandOption = "",
    log: LogOption = "",
    join: JoinUrlOption = "",
    token_expires: ExpiresOption = "7d",
    agent_options: AgentArguments = None,
    url: UrlOption = DEFAULT_URL,
    dry_run: DryRunOption = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Submit a Slurm job whose nodes join a pool while it runs. Its agents leave before its time limit."""
    from scheduler.slurm.pilot_script import PilotJob, render_pilot

    pilot = PilotJob(
        pool=pool,
        nodes=nodes,
        url=join or resolve_target(url).url,
        command=_find_command(command),
        partition=partition,
        time_limit=time_limit,
        gpus_per_node=gpus_per_node,
        log=log,
        agent_options=tuple(agent_options or ()),
        sbatch_options=tuple(sbatch or ()),
    )
    if dry_run:
        typer.echo(render_pilot(pilot), nl=False)
        return
    job_id = _submit(pilot, url, parse_duration(token_expires, option="--token-expires"))
    result = {"job": job_id, "pool": pool, "nodes": nodes}
    print_document(result, output, lambda: render_facts({name: str(value) for name, value in result.items()}))


@app.command("list")
def list_jobs(output: OutputOption = OutputFormat.TABLE) -> None:
    """List your pilot jobs that have not ended."""
    from scheduler.slurm.slurm_client import list_pilots

    with _slurm_errors():
        pilots = list_pilots()
    print_document([asdict(each) for each in pilots], output, lambda: render_pilots(pilots))


@app.command("cancel")
def cancel(job: JobArgument) -> None:
    """Cancel a pilot job. Its ranks save and exit, and its nodes disappear."""
    from scheduler.slurm.slurm_client import cancel_job, list_pilots

    with _slurm_errors():
        known = [each.id for each in list_pilots()]
        if job not in known:
            raise InputError(
                f"JOB: {job!r} is not one of your pilot jobs. Your pilot jobs: {', '.join(known) or 'none'}."
            )
        cancel_job(job)
    print_message(f"Slurm job {job} was cancelled.")


@app.command("watch")
def watch(
    *,
    pool: PoolOption,
    nodes_max: NodesMaxOption,
    gpus_per_node: NodeGpusOption,
    gpu: GpuModelOption = "",
    partition: PartitionOption = "",
    time_limit: TimeOption = "",
    sbatch: SbatchOption = None,
    command: CommandOption = "",
    log: LogOption = "",
    join: JoinUrlOption = "",
    token_expires: ExpiresOption = "7d",
    every: IntervalOption = "30s",
    agent_options: AgentArguments = None,
    url: UrlOption = DEFAULT_URL,
    submits: SubmitOption = False,
    once: OnceOption = False,
) -> None:
    """Propose or submit pilots for pending jobs that lack GPUs, until Ctrl-C. Agents return idle nodes themselves."""
    from scheduler.slurm.pilot_demand import PilotLimits
    from scheduler.slurm.pilot_script import PilotJob

    pilot = PilotJob(
        pool=pool,
        nodes=1,
        url=join or resolve_target(url).url,
        command=_find_command(command),
        partition=partition,
        time_limit=time_limit,
        gpus_per_node=gpus_per_node,
        log=log,
        agent_options=tuple(agent_options or ()),
        sbatch_options=tuple(sbatch or ()),
    )
    limits = PilotLimits(nodes_max, gpus_per_node)
    pause_s = parse_duration(every, option="--every")
    expires_s = parse_duration(token_expires, option="--token-expires")
    while True:
        try:
            _act_on_demand(pilot, limits, url, gpu=gpu, expires_s=expires_s, submits=submits)
        except CommandError as error:
            if once:
                raise
            print_message(f"Error: {error}. Retrying in {pause_s:.0f} s.")  # the service or slurmctld restarts
        if once:
            return
        time.sleep(pause_s)


def describe_proposal(proposal: PilotProposal, limits: PilotLimits, *, submits: bool) -> str:
    """Return one line that says how many nodes pending jobs need, and what to do about it."""
    nodes, submitted = sum(proposal.wanted), sum(proposal.pilots)
    noun = "node" if nodes == 1 else "nodes"
    text = f"pending jobs need {proposal.pending_gpus} GPUs: {nodes} more {noun} of {limits.gpus_per_node}"
    if max(proposal.wanted, default=1) > 1:
        text += f", in pilots of {' + '.join(map(str, proposal.wanted))} nodes"
    if submitted < nodes:
        text += f"; --nodes-max permits {submitted}"
    if submits or not submitted:
        return text
    return f"{text}. To submit them, add --submit."


def render_pilots(pilots: Iterable[SlurmJob]) -> RenderableType:
    return render_table(
        ([each.id, each.pool, str(each.nodes), each.state.lower(), _format_end(each), each.place] for each in pilots),
        headers=["job", "pool", "nodes", "state", "ends (UTC)", "nodes or reason"],
        right_aligned=["nodes"],
        empty="You have no pilot jobs. `ebbtide slurm submit` submits one.",
    )


def _format_end(job: SlurmJob) -> str:
    return "" if job.end_s is None else format_time(job.end_s)


def _find_command(command: str) -> tuple[str, ...]:
    return (str(Path(command).absolute()),) if command else (sys.executable, "-P", "-m", "cli")


def _act_on_demand(
    pilot: PilotJob, limits: PilotLimits, url: str, *, gpu: str, expires_s: float, submits: bool
) -> None:
    """Print what pending jobs need, and submit it if wanted."""
    from cli.pilot_demand import read_pilot_demand
    from scheduler.slurm.slurm_client import list_pilots

    with service_client(url) as client, _slurm_errors():
        demand = read_pilot_demand(client, list_pilots(pool=pilot.pool), limits, pool=pilot.pool, gpu=gpu)
    if demand.unmatched_jobs:
        print_message(
            f"{demand.unmatched_jobs} pending jobs require a GPU model, and pool {pilot.pool} has had no node yet. "
            "To count them, state the model of new nodes with --gpu."
        )
    proposal = demand.proposal
    if proposal.wanted:
        typer.echo(describe_proposal(proposal, limits, submits=submits))
    for nodes in proposal.pilots if submits else ():
        typer.echo(f"submitted Slurm job {_submit(replace(pilot, nodes=nodes), url, expires_s)}")


def _submit(pilot: PilotJob, url: str, expires_s: float) -> str:
    """Create a join token for the nodes of the pilot, and submit it. The token of a rejected pilot is deleted."""
    from scheduler.slurm.slurm_client import SlurmError, submit_pilot

    with service_client(url) as client, _slurm_errors():
        token = client.create_join_token(pilot.pool, uses=pilot.nodes, expires_in_s=expires_s)
        try:
            return submit_pilot(pilot, token["secret"])
        except SlurmError:
            client.delete_join_token(token["id"])
            raise


@contextmanager
def _slurm_errors() -> Iterator[None]:
    """Turn errors of Slurm's commands into errors of the command."""
    from scheduler.slurm.slurm_client import SlurmError

    try:
        yield
    except SlurmError as error:
        raise CommandError(str(error)) from None
