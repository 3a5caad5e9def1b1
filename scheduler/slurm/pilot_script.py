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

# One agent that ends, or one node that Slurm takes back, must not end the agents of the other nodes.
_SRUN = ("srun", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")


@dataclass(frozen=True, slots=True)
class PilotJob:
    """A pilot to submit.

    Args:
        pool: pool that its nodes join.
        time_limit: as `sbatch --time` takes it; empty for that of the partition.
        gpus_per_node: GPUs that Slurm allocates on each node; 0 for none.
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
    gpus_per_node: int = 0
    log: str = ""
    agent_options: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return JOB_NAME_PREFIX + self.pool


def render_pilot(pilot: PilotJob) -> str:
    """Return the batch script of a pilot."""
    agent = (*pilot.command, "agent", "--slurm", "--join", pilot.url, *pilot.agent_options)
    directives = "\n".join(f"#SBATCH {option}" for option in _list_directives(pilot))
    return f"""#!/bin/bash
{directives}
exec {shlex.join(_SRUN)} \\
    {shlex.join(agent)}
"""


def _list_directives(pilot: PilotJob) -> Sequence[str]:
    options = {
        "--job-name": pilot.name,
        "--nodes": str(pilot.nodes),
        "--partition": pilot.partition,
        "--time": pilot.time_limit,
        "--gpus-per-node": str(pilot.gpus_per_node or ""),
        "--output": pilot.log,
    }
    stated = [f"{name}={_quote(value)}" for name, value in options.items() if value]
    # A pilot that was requeued could not join: its token is used. The whole node is used by one task.
    return [*stated, "--ntasks-per-node=1", "--no-requeue", *pilot.sbatch_options]


def _quote(value: str) -> str:
    """Quote a value of a directive, which Slurm splits at white space."""
    return f'"{value}"' if any(map(str.isspace, value)) else value
