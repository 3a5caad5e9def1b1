"""Environment and command line of the processes of a generation, as data. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from scheduler.agent.exported_plan import fill_command
from scheduler.domain.run_document import LaunchMode, MasterAddress, RankSeat, RunDocument

_INHERITED = frozenset({
    "PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
})  # fmt: skip
"""Variables that describe the machine. LD_LIBRARY_PATH is one of them: some images have the GPU driver only there."""
_INHERITED_PREFIX = "LC_"
_NOT_OF_PODS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})
_NOT_OF_PODS_PREFIXES = ("EBBTIDE_", "TORCHELASTIC_")
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_UNLIMITED_RESTARTS = 2**31 - 1


class GpuVendor(StrEnum):
    """The maker of a machine's GPUs, which decides the variable that selects devices."""

    NVIDIA = "nvidia"
    AMD = "amd"
    ASCEND = "ascend"


_DEVICE_VARIABLE = {
    GpuVendor.NVIDIA: "CUDA_VISIBLE_DEVICES",
    GpuVendor.AMD: "HIP_VISIBLE_DEVICES",
    GpuVendor.ASCEND: "ASCEND_RT_VISIBLE_DEVICES",
}


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts of the machine that the ranks' environment contains.

    Args:
        cores: CPU cores of the machine.
        gpu_ids: identifier by GPU index: a UUID if the GPU has one, else its number. Empty without real GPUs.
    """

    cores: int
    gpu_ids: Mapping[int, str] = field(default_factory=dict)
    vendor: GpuVendor = GpuVendor.NVIDIA


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of a generation as its ranks see them.

    `checkpoint_dir` may be the URL of an object store. `plan` is None for a job without a plan, and `secrets`, the
    folder with the files of secrets, for a job without secrets.
    """

    run_dir: Path
    checkpoint_dir: str
    home: Path
    plan: Path | None = None
    secrets: Path | None = None


def list_processes(document: RunDocument) -> tuple[RankSeat, ...]:
    """Return the seats that a process is started for: each rank's, or only the node's first one."""
    return document.ranks if document.launch is LaunchMode.RANK else document.ranks[:1]


def build_argv(
    document: RunDocument, master: MasterAddress, *, checkpoint_dir: str, plan_file: str = ""
) -> tuple[str, ...]:
    """Return the command, with `{checkpoint_dir}` and the placeholders of plan and `launch: node` filled in.

    Args:
        plan_file: path of the plan in the words of the job's framework.

    Raises:
        ValueError: the job has no command, or a placeholder has no value.
    """
    if not document.command:
        raise ValueError("command is empty. Set the command that starts the job.")
    values: dict[str, object] = {"{checkpoint_dir}": checkpoint_dir}
    if document.launch is LaunchMode.NODE:
        values |= _build_launcher_values(document, master)
    command = fill_command(document.command, document, plan_file)
    return tuple(_fill(word, values) for word in command)


def _build_launcher_values(document: RunDocument, master: MasterAddress) -> dict[str, object]:
    return {
        "{nnodes}": document.nodes,
        "{node_rank}": document.node_rank,
        "{nproc_per_node}": len(document.ranks),
        "{master_addr}": master.host,
        "{master_port}": master.port,
    }


def build_environment(
    document: RunDocument,
    seat: RankSeat,
    master: MasterAddress,
    *,
    paths: RunPaths,
    machine: MachineFacts,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return all variables of one process: the inherited ones, then the job's, then those that Ebbtide sets.

    Args:
        inherited: variables of the machine or the pod (`select_inherited`, `select_pod_variables`).

    Raises:
        ValueError: the machine has no GPU with an index of the document.
    """
    variables = {
        "OMP_NUM_THREADS": str(_count_threads(document, machine)),
        "HOME": str(paths.home),
        "PYTHONFAULTHANDLER": "1",  # stacks of crashes, and of hung ranks as they are aborted
        **inherited,
        **document.env,
    }
    if document.venv:
        variables["PATH"] = f"{document.venv}/bin:{variables['PATH']}"
        variables["VIRTUAL_ENV"] = document.venv
    return {
        **variables,
        **_select_devices(document, machine),
        **_build_rendezvous(document, seat, master),
        **_build_contract(document, paths),
    }


def select_inherited(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that processes inherit on a machine, which always include PATH."""
    chosen = {
        name: value for name, value in inherited.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIX)
    }
    return {"PATH": _DEFAULT_PATH, **chosen}


def select_pod_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that processes inherit inside a pod, whose template and image are the job's."""
    chosen = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_OF_PODS and not name.startswith(_NOT_OF_PODS_PREFIXES)
    }
    return {"PATH": _DEFAULT_PATH, **chosen}


def _fill(word: str, values: Mapping[str, object]) -> str:
    for placeholder, value in values.items():
        word = word.replace(placeholder, str(value))
    return word


def _count_threads(document: RunDocument, machine: MachineFacts) -> int:
    """Return the threads per rank: the job's share of the cores, where each GPU of the machine has an equal share."""
    ranks = max(1, len(document.ranks))
    if document.limits.cpus is not None:
        return max(1, int(document.limits.cpus) // ranks)
    return max(1, machine.cores // max(ranks, len(machine.gpu_ids)))


def _select_devices(document: RunDocument, machine: MachineFacts) -> dict[str, str]:
    """Return the variable that makes the job's GPUs visible, in the order of local ranks: LOCAL_RANK indexes them."""
    if not machine.gpu_ids or not document.has_devices:
        return {}
    gpus = [seat.gpu for seat in sorted(document.ranks, key=lambda seat: seat.local_rank)]
    missing = [gpu for gpu in gpus if gpu not in machine.gpu_ids]
    if missing:
        present = ", ".join(map(str, sorted(machine.gpu_ids)))
        raise ValueError(f"ranks: gpu is {missing[0]}, but the GPUs of this machine are {present}.")
    ids = [machine.gpu_ids[gpu] for gpu in gpus]
    # Only this one of AMD's variables is documented to accept identifiers.
    is_rocr = machine.vendor is GpuVendor.AMD and not all(each.isdecimal() for each in ids)
    return {"ROCR_VISIBLE_DEVICES" if is_rocr else _DEVICE_VARIABLE[machine.vendor]: ",".join(ids)}


def _build_rendezvous(document: RunDocument, seat: RankSeat, master: MasterAddress) -> dict[str, str]:
    """Return the variables that torchrun sets. A process per node gets only those that hold for the whole node."""
    node = {
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "NODE_RANK": str(document.node_rank),
    }
    if document.launch is LaunchMode.NODE:
        return node
    return {
        **node,
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(document.world_size),
        "LOCAL_WORLD_SIZE": str(len(document.ranks)),
        "GROUP_RANK": str(document.node_rank),
        "GROUP_WORLD_SIZE": str(document.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(document.world_size),
        "TORCHELASTIC_RUN_ID": document.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(document.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(_UNLIMITED_RESTARTS),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _build_contract(document: RunDocument, paths: RunPaths) -> dict[str, str]:
    secrets = {} if paths.secrets is None else {"EBBTIDE_SECRETS_DIR": str(paths.secrets)}
    interval_s = math.inf if document.checkpoint_interval_s is None else document.checkpoint_interval_s
    return {
        "EBBTIDE_NODE": document.node,
        "EBBTIDE_GPUS": ",".join(str(seat.gpu) for seat in sorted(document.ranks, key=lambda seat: seat.local_rank)),
        "EBBTIDE_JOB_ID": document.job_id,
        "EBBTIDE_GENERATION": str(document.generation),
        "EBBTIDE_URL": document.url,
        "EBBTIDE_TOKEN": document.token,
        "EBBTIDE_PLAN": "" if paths.plan is None else str(paths.plan),
        "EBBTIDE_FRAMEWORK": document.framework,
        "EBBTIDE_CHECKPOINT_DIR": paths.checkpoint_dir,
        "EBBTIDE_RUN_DIR": str(paths.run_dir),
        "EBBTIDE_STEPS": str(document.steps),
        "EBBTIDE_FROZEN_LAYERS": str(document.frozen_layers),
        "EBBTIDE_CHECKPOINT_STEP": str(document.checkpoint_step),
        "EBBTIDE_CHECKPOINT_INTERVAL_S": str(interval_s),
        "EBBTIDE_CHECKPOINT_KEEP": str(document.checkpoint_keep),
        **secrets,
    }


def is_reference_trainer(command: Sequence[str]) -> bool:
    """Return whether the command is a module of Ebbtide's own trainer, whose ranks a supervisor can fork."""
    match command:
        case ["python", "-m", module, *_]:
            return module.startswith("scheduler.trainer.")
    return False
