"""The batch script of a pilot: a Slurm job whose tasks are node agents, one per node.

The join token is not in the script, which other users may be able to read. It is in the environment of the job.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_VARIABLE = "EBBTIDE_JOIN_TOKEN"
JOB_NAME_PREFIX = "ebbtide-"
"""Names of pilot jobs begin with it and end with the pool."""

# One agent that ends, or one node that Slurm takes back, must not end the agents of the other nodes. Ranks inherit the
# CPUs of their agent, which Slurm may bind to one core.
_SRUN = ("srun", "--ntasks-per-node=1", "--cpu-bind=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
# A job that has whole nodes has their GPUs, but its steps get none without a request.
_ALL_GPUS = "${SLURM_GPUS_ON_NODE:+--gpus-per-node=$SLURM_GPUS_ON_NODE}"


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The part of each node that a pilot requests: a whole node, or some of its GPUs with CPUs and memory for each.

    Args:
        gpus: GPUs that Slurm allocates on each node; 0 for all GPUs that it manages there.
        unmanaged_gpus: GPUs of each node where Slurm manages none.
        cpus_per_gpu: CPUs for each GPU of a shared node; 0 for Slurm's default.
        memory_per_gpu: memory for each GPU of a shared node, as `sbatch --mem-per-gpu` takes it; empty for Slurm's
            default.
    """

    gpus: int = 0
    unmanaged_gpus: int = 0
    cpus_per_gpu: int = 0
    memory_per_gpu: str = ""

    def __post_init__(self) -> None:
        if self.gpus and self.unmanaged_gpus:
            raise ValueError(
                f"--node-gpus: got {self.unmanaged_gpus} beside --gpus-per-node {self.gpus}. Use --gpus-per-node where "
                "Slurm manages GPUs, and --node-gpus elsewhere."
            )
        if not self.is_whole_node and not self.gpus:
            option = "--cpus-per-gpu" if self.cpus_per_gpu else "--mem-per-gpu"
            raise ValueError(f"{option}: needs --gpus-per-node N, the GPUs that the pilot gets on each node.")

    @property
    def is_whole_node(self) -> bool:
        return not self.cpus_per_gpu and not self.memory_per_gpu

    @property
    def counted_gpus(self) -> int:
        """GPUs of each node as far as they are stated, else 0."""
        return self.gpus or self.unmanaged_gpus


@dataclass(frozen=True, slots=True)
class PilotJob:
    """A pilot to submit.

    Args:
        pool: pool that its nodes join.
        time_limit: as `sbatch --time` takes it; empty for that of the partition.
        share: what it requests of each node.
        log: path of the output of batch script and agents, with the patterns of `sbatch --output`.
        command: words that start `ebbtide` on the nodes.
        url: control plane, as the nodes reach it.
        agent_options: further options of the agent.
        sbatch_options: further options of `sbatch`, such as `--account=research`.
    """

    pool: str
    nodes: int
    url: str
    command: tuple[str, ...]
    partition: str = ""
    time_limit: str = ""
    share: NodeShare = NodeShare()
    log: str = ""
    agent_options: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return JOB_NAME_PREFIX + self.pool


def render_pilot(pilot: PilotJob) -> str:
    """Return the batch script of a pilot."""
    share = pilot.share
    gpus = ("--gpus", str(share.unmanaged_gpus)) if share.unmanaged_gpus else ()
    agent = (*pilot.command, "agent", "--slurm", "--join", pilot.url, *gpus, *pilot.agent_options)
    directives = "\n".join(f"#SBATCH {option}" for option in _list_directives(pilot))
    srun = shlex.join(_SRUN) if share.counted_gpus else f"{shlex.join(_SRUN)} {_ALL_GPUS}"
    return f"""#!/bin/bash
{directives}
exec {srun} \\
    {shlex.join(agent)}
"""


def _list_directives(pilot: PilotJob) -> Sequence[str]:
    share = pilot.share
    options = {
        "--job-name": pilot.name,
        "--nodes": str(pilot.nodes),
        "--partition": pilot.partition,
        "--time": pilot.time_limit,
        "--gpus-per-node": str(share.gpus or ""),
        "--cpus-per-gpu": str(share.cpus_per_gpu or ""),
        "--mem-per-gpu": share.memory_per_gpu,
        "--output": pilot.log,
    }
    stated = [f"{name}={_quote(value)}" for name, value in options.items() if value]
    # By default, Slurm allocates one core for one task. Memory of a whole node is allocated by request only.
    whole = ["--exclusive"] if share.is_whole_node else []
    if share.is_whole_node and not any(option.startswith("--mem") for option in pilot.sbatch_options):
        whole.append("--mem=0")
    # A pilot that was requeued could not join: its token is used.
    return [*stated, *whole, "--ntasks-per-node=1", "--no-requeue", *pilot.sbatch_options]


def _quote(value: str) -> str:
    """Quote a value of a directive, which Slurm splits at white space."""
    return f'"{value}"' if any(map(str.isspace, value)) else value
