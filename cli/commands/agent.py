"""`ebbtide agent`: the daemon that runs ranks on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.identity import parse_duration
from cli.exit_codes import CommandError, InputError
from cli.inputs import input_errors_from
from scheduler.agent.resource_limits import MemoryLimit, MemoryPolicy

if TYPE_CHECKING:
    from scheduler.agent.containment import ContainmentPolicy
    from scheduler.agent.daemon import AgentOptions
    from scheduler.agent.run_retention import RetentionLimits
    from scheduler.slurm.allocation import DepartureTimes

_DEFAULT_STATE = Path("/var/lib/ebbtide-agent")
_VARIABLES = "EBBTIDE_AGENT_"
"""Prefix of the variables that set options, for the agent that `ebbtide serve` starts."""

StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="Folder for credential, runs, logs and checkpoints. One agent uses it. "
        f"Default: {_DEFAULT_STATE}. With --slurm: parent of a new folder, which is deleted at the end.",
    ),
]
JoinOption = Annotated[str, typer.Option("--join", metavar="URL", help="Control plane to join, once.")]
TokenOption = Annotated[
    Path | None, typer.Option("--token-file", help="File with a join token from `ebbtide machines token`.")
]
NameOption = Annotated[str, typer.Option("--name", help="Name of the machine and its node. Default: its host name.")]
AddressOption = Annotated[
    str, typer.Option("--address", help="Where other machines reach this one. Default: its address on that route.")
]
GpusOption = Annotated[int, typer.Option("--gpus", min=0, help="Number of GPUs. 0: the detected ones.")]
GpuOption = Annotated[str, typer.Option("--gpu", help="GPU profile or product, instead of the detected one.")]
GpuMemoryOption = Annotated[
    str, typer.Option("--gpu-memory", help="Memory of each GPU, such as 48GiB. Default: the detected one.")
]
CheckpointOption = Annotated[
    list[Path] | None, typer.Option("--checkpoint-path", help="Folder whose reachability is reported. Repeatable.")
]
WritableOption = Annotated[
    list[Path] | None,
    typer.Option("--writable", envvar=f"{_VARIABLES}WRITABLE", help="Folder that all jobs may write to. Repeatable."),
]
HiddenOption = Annotated[list[Path] | None, typer.Option("--hide", help="Folder that no rank may see. Repeatable.")]
UserMapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--user",
        metavar="OWNER=USER",
        envvar=f"{_VARIABLES}USER",
        help="User of this machine that runs the jobs of an owner, by name or owner id. Repeatable.",
    ),
]
DefaultUserOption = Annotated[
    str,
    typer.Option(
        "--default-user",
        envvar=f"{_VARIABLES}DEFAULT_USER",
        help="User of all other jobs. Default: `ebbtide-jobs` if it exists, else `nobody`.",
    ),
]
MemoryLimitOption = Annotated[
    MemoryLimit,
    typer.Option(
        "--memory-limit",
        envvar=f"{_VARIABLES}MEMORY_LIMIT",
        help="Main memory of jobs that state none: the share of their GPUs, all but the reserve (machine), or no limit "
        "(none). Jobs on slots of processors get all but the reserve.",
    ),
]
ReserveMemoryOption = Annotated[
    str,
    typer.Option(
        "--reserve-memory",
        metavar="SIZE",
        envvar=f"{_VARIABLES}RESERVE_MEMORY",
        help="Main memory that no job gets. Default: 5%, from 1GiB to 8GiB.",
    ),
]
RequireOption = Annotated[
    bool,
    typer.Option(
        "--require-containment",
        envvar=f"{_VARIABLES}REQUIRE_CONTAINMENT",
        help="Refuse to start where ranks cannot be contained in full.",
    ),
]
LeaveWithinOption = Annotated[
    str,
    typer.Option(
        "--leave-within",
        metavar="TIME",
        envvar=f"{_VARIABLES}LEAVE_WITHIN",
        help="On SIGTERM, let ranks save and exit within this time. Default: they go on without the agent. "
        "Ctrl-C always lets them save and exit.",
    ),
]
SlurmOption = Annotated[
    bool,
    typer.Option(
        "--slurm",
        help="Serve a Slurm allocation: name, GPUs, join token and end come from it. See `ebbtide slurm submit`.",
    ),
]
LeaveBeforeOption = Annotated[
    str,
    typer.Option("--leave-before", metavar="TIME", help="With --slurm: leave this long before the job's time limit."),
]
IdleOption = Annotated[
    str,
    typer.Option("--return-idle", metavar="TIME", help="With --slurm: leave after this time without ranks. 0s: stay."),
]
CheckOption = Annotated[
    str, typer.Option("--check-every", metavar="TIME", help="With --slurm: time between two looks at the job.")
]
WithParentOption = Annotated[bool, typer.Option("--with-parent", hidden=True)]
KeepRunsOption = Annotated[
    int, typer.Option("--keep-runs", min=0, help="Ended runs of each job whose folders stay, the newest ones.")
]
KeepTimeOption = Annotated[
    str, typer.Option("--keep-time", metavar="TIME", help="How long they stay at most, such as 12h or 7d.")
]
KeepCheckpointsOption = Annotated[
    str,
    typer.Option(
        "--keep-checkpoints",
        metavar="TIME",
        help="How long checkpoints below --state stay after the job's last run was deleted. Default: forever.",
    ),
]


def agent(
    *,
    state: StateOption = None,
    join: JoinOption = "",
    token_file: TokenOption = None,
    name: NameOption = "",
    address: AddressOption = "",
    gpus: GpusOption = 0,
    gpu: GpuOption = "",
    gpu_memory: GpuMemoryOption = "",
    checkpoint_path: CheckpointOption = None,
    writable: WritableOption = None,
    hide: HiddenOption = None,
    user: UserMapOption = None,
    default_user: DefaultUserOption = "",
    memory_limit: MemoryLimitOption = MemoryLimit.SHARE,
    reserve_memory: ReserveMemoryOption = "",
    requires_containment: RequireOption = False,
    leave_within: LeaveWithinOption = "",
    slurm: SlurmOption = False,
    leave_before: LeaveBeforeOption = "2m",
    return_idle: IdleOption = "10m",
    check_every: CheckOption = "30s",
    ends_with_parent: WithParentOption = False,
    keep_runs: KeepRunsOption = 2,
    keep_time: KeepTimeOption = "7d",
    keep_checkpoints: KeepCheckpointsOption = "",
) -> None:
    """Run ranks on this machine. The first start joins the machine to a pool. After SIGTERM, ranks go on."""
    import logging

    from cli.supervisor import exit_with_parent
    from scheduler.agent.daemon import AgentOptions
    from scheduler.agent.inventory import InventoryOverrides
    from scheduler.package_version import get_package_version

    if ends_with_parent:
        exit_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    memory = _build_memory_policy(memory_limit, reserve_memory)
    options = AgentOptions(
        state=state or _DEFAULT_STATE,
        version=get_package_version(),
        url=join,
        token_file=token_file,
        name=name,
        address=address,
        overrides=InventoryOverrides(gpus=gpus, gpu=gpu, gpu_memory_bytes=_parse_bytes(gpu_memory, "--gpu-memory")),
        policy=_build_policy(user or [], default_user, writable or [], memory, requires_full=requires_containment),
        hidden=tuple(hide or []),
        checkpoint_paths=tuple(checkpoint_path or []),
        leave_within_s=parse_duration(leave_within, option="--leave-within") if leave_within else None,
        retention=_build_retention(keep_runs, keep_time, keep_checkpoints),
    )
    _run(options, state, _parse_times(leave_within, leave_before, return_idle, check_every), is_pilot=slurm)


def _run(options: AgentOptions, state: Path | None, times: DepartureTimes, *, is_pilot: bool) -> None:
    from scheduler.agent.daemon import run_agent

    try:
        with input_errors_from(""):
            if is_pilot:
                _run_pilot(options, state, times)
            else:
                run_agent(options)
    except OSError as error:
        raise InputError(f"--state: {options.state} cannot be used: {error}") from error


def _parse_times(leave_within: str, leave_before: str, return_idle: str, check_every: str) -> DepartureTimes:
    from scheduler.slurm.allocation import LEAVE_WITHIN_S, DepartureTimes

    return DepartureTimes(
        leave_within_s=parse_duration(leave_within, option="--leave-within") if leave_within else LEAVE_WITHIN_S,
        leave_before_s=parse_duration(leave_before, option="--leave-before"),
        idle_s=parse_duration(return_idle, option="--return-idle") or float("inf"),
        check_s=max(1.0, parse_duration(check_every, option="--check-every")),
    )


def _run_pilot(options: AgentOptions, state: Path | None, times: DepartureTimes) -> None:
    """Run an agent for this node's part of a Slurm allocation, in a folder that is deleted at the end."""
    from dataclasses import replace

    from scheduler.agent.daemon import run_agent
    from scheduler.slurm.allocation import Allocation, AllocationWatch
    from scheduler.slurm.pilot_folder import open_pilot_folder
    from scheduler.slurm.pilot_script import TOKEN_VARIABLE
    from scheduler.slurm.slurm_client import SlurmError

    allocation = Allocation.read(os.environ)
    try:
        allocation.check_grant(stated_gpus=options.overrides.gpus)
    except SlurmError as error:
        raise CommandError(str(error)) from None
    watch = AllocationWatch(allocation, times, parent_pid=os.getppid())
    token = os.environ.pop(TOKEN_VARIABLE, "")
    with open_pilot_folder(allocation.machine_name, parent=state, token=token) as folder:
        watch.start()
        granted, overrides = allocation.gpus, options.overrides
        if granted and overrides.gpu and not overrides.gpus:
            overrides = replace(overrides, gpus=len(granted))
        run_agent(
            replace(
                options,
                state=folder.state,
                token_file=options.token_file or folder.token_file,
                name=options.name or allocation.machine_name,
                overrides=overrides,
                policy=replace(options.policy, ends_with_agent=True),
                leave_within_s=times.leave_within_s,
                departure=watch,
                granted_gpus=granted,
            )
        )


def _build_policy(
    users: list[str], default_user: str, writable: list[Path], memory: MemoryPolicy, *, requires_full: bool
) -> ContainmentPolicy:
    from scheduler.agent.containment import ContainmentPolicy

    return ContainmentPolicy(
        users=_parse_users(users),
        default_user=default_user,
        writable=tuple(path.resolve() for path in writable),
        requires_full=requires_full,
        memory=memory,
    )


def _build_memory_policy(limit: MemoryLimit, reserve: str) -> MemoryPolicy:
    return MemoryPolicy(limit, _parse_bytes(reserve, "--reserve-memory") if reserve else None)


def _build_retention(keep_runs: int, keep_time: str, keep_checkpoints: str) -> RetentionLimits:
    from scheduler.agent.run_retention import RetentionLimits

    return RetentionLimits(
        runs=keep_runs,
        period_s=parse_duration(keep_time, option="--keep-time"),
        checkpoints_s=parse_duration(keep_checkpoints, option="--keep-checkpoints") if keep_checkpoints else None,
    )


def _parse_bytes(text: str, option: str) -> int:
    """Parse a size in bytes or with a unit; 0 for an empty text."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text or "0"))
    except ValidationError:
        raise InputError(f"{option}: {text!r} is not a size. Use a number of bytes, or a unit: 48GiB.") from None


def _parse_users(entries: list[str]) -> dict[str, str]:
    """Parse `OWNER=USER` entries."""
    users = {}
    for entry in entries:
        owner, separator, user = entry.partition("=")
        if not (owner and separator and user):
            raise InputError(f"--user: {entry!r} is invalid. Use OWNER=USER, such as --user alice=alice.")
        users[owner] = user
    return users
