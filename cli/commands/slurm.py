"""`ebbtide slurm`: submits, lists and cancels Slurm jobs whose tasks are node agents."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from cli.commands.identity import parse_duration
from cli.completion import complete_pool_names
from cli.connection import DEFAULT_URL, UrlOption, resolve_target, service_client
from cli.exit_codes import CommandError, InputError
from cli.inputs import input_errors_from
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
    from scheduler.slurm.pilot_script import NodeShare, PilotJob
    from scheduler.slurm.slurm_client import SlurmJob

app = typer.Typer(name="slurm", help="Submit, list or cancel Slurm jobs that run node agents.", no_args_is_help=True)

PoolOption = Annotated[
    str,
    typer.Option(
        "--pool",
        autocompletion=complete_pool_names,
        help="Existing pool that the nodes join. Default: the only training pool.",
    ),
]
NodesOption = Annotated[int, typer.Option("--nodes", "-N", min=1, help="Nodes of the Slurm job.")]
PartitionOption = Annotated[str, typer.Option("--partition", "-p", help="Partition. Default: Slurm's.")]
TimeOption = Annotated[str, typer.Option("--time", "-t", help="Time limit, as `sbatch --time` takes it.")]
GpusOption = Annotated[
    int,
    typer.Option(
        "--gpus-per-node", min=0, help="GPUs that Slurm allocates on each node. Default: all that it manages."
    ),
]
WatchedGpusOption = Annotated[
    int, typer.Option("--gpus-per-node", min=0, help="GPUs that Slurm allocates on each new node.")
]
NodeGpusOption = Annotated[
    int, typer.Option("--node-gpus", min=0, help="GPUs of each node where Slurm does not manage GPUs.")
]
CpusOption = Annotated[
    int,
    typer.Option(
        "--cpus-per-gpu", min=0, help="CPUs for each GPU of a node shared with other jobs. Default: whole nodes."
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--mem-per-gpu",
        metavar="SIZE",
        help="Memory for each GPU of a node shared with other jobs, as `sbatch` takes it. Default: whole nodes.",
    ),
]
SbatchOption = Annotated[
    list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="Further option of sbatch. Repeatable.")
]
CommandOption = Annotated[
    str, typer.Option("--command", help="Path of `ebbtide` on the nodes. Default: this installation.")
]
LogOption = Annotated[str, typer.Option("--log", help="File of the agents' output, as `sbatch --output` takes it.")]
JoinUrlOption = Annotated[
    str, typer.Option("--join", metavar="URL", help="Control plane, as nodes reach it. Default: that of this command.")
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
    pool: PoolOption = "",
    nodes: NodesOption = 1,
    partition: PartitionOption = "",
    time_limit: TimeOption = "",
    gpus_per_node: GpusOption = 0,
    node_gpus: NodeGpusOption = 0,
    cpus_per_gpu: CpusOption = 0,
    memory_per_gpu: MemoryOption = "",
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

    expires_s = _parse_expiry(token_expires)
    pilot = PilotJob(
        pool=pool or _find_training_pool(url),
        nodes=nodes,
        url=_find_join_url(join, url),
        command=_find_command(command),
        partition=partition,
        time_limit=time_limit,
        share=_build_share(gpus_per_node, node_gpus, cpus_per_gpu, memory_per_gpu),
        log=log,
        agent_options=tuple(agent_options or ()),
        sbatch_options=tuple(sbatch or ()),
    )
    if dry_run:
        typer.echo(render_pilot(pilot), nl=False)
        return
    job_id = _submit(pilot, url, expires_s)
    result = {"job": job_id, "pool": pilot.pool, "nodes": nodes}
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
    pool: PoolOption = "",
    nodes_max: NodesMaxOption,
    gpus_per_node: WatchedGpusOption = 0,
    node_gpus: NodeGpusOption = 0,
    cpus_per_gpu: CpusOption = 0,
    memory_per_gpu: MemoryOption = "",
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

    share = _build_share(gpus_per_node, node_gpus, cpus_per_gpu, memory_per_gpu)
    if not share.counted_gpus:
        raise InputError("--gpus-per-node: state the GPUs of each new node, or --node-gpus where Slurm manages none.")
    pause_s, expires_s = parse_duration(every, option="--every"), _parse_expiry(token_expires)
    pilot = PilotJob(
        pool=pool or _find_training_pool(url),
        nodes=1,
        url=_find_join_url(join, url) if submits else "",
        command=_find_command(command),
        partition=partition,
        time_limit=time_limit,
        share=share,
        log=log,
        agent_options=tuple(agent_options or ()),
        sbatch_options=tuple(sbatch or ()),
    )
    limits = PilotLimits(nodes_max, share.counted_gpus)
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


def _find_training_pool(url: str) -> str:
    with service_client(url) as client:
        pools = [pool["name"] for pool in client.pools() if pool["kind"] == "training"]
    if len(pools) != 1:
        remedy = (
            f"allowed: {', '.join(pools)}" if pools else "create one with `ebbtide pools create NAME --kind training`"
        )
        raise InputError(f"--pool: the service has {len(pools)} training pools, so the pool must be stated; {remedy}.")
    return pools[0]


def _find_join_url(join: str, url: str) -> str:
    """Return the URL of the control plane for nodes. Warn if it is a loopback address by default."""
    from scheduler.network_addresses import is_loopback

    target = join or resolve_target(url).url
    if not join and is_loopback(urlsplit(target).hostname or ""):
        print_message(
            f"Warning: only this machine reaches {target}. If other machines are nodes of the pilot, state a URL that "
            "they reach with --join."
        )
    return target


def _build_share(gpus_per_node: int, node_gpus: int, cpus_per_gpu: int, memory_per_gpu: str) -> NodeShare:
    from scheduler.slurm.pilot_script import NodeShare

    with input_errors_from(""):
        return NodeShare(gpus_per_node, node_gpus, cpus_per_gpu, memory_per_gpu)


def _parse_expiry(text: str) -> float:
    """Return the lifetime of a join token in seconds."""
    from scheduler.documents.machine import TOKEN_LIFETIME_S_MAX

    expires_s = parse_duration(text, option="--token-expires")
    if not 0 < expires_s <= TOKEN_LIFETIME_S_MAX:
        raise InputError(f"--token-expires: got {text}. Use a time of at least 1s and at most 7d.")
    return expires_s


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
