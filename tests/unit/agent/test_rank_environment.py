"""The variables and the command line that a process of a generation gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.environment import read_rank_environment
from scheduler.agent.rank_environment import (
    GpuVendor,
    MachineFacts,
    RunPaths,
    build_argv,
    build_environment,
    is_reference_trainer,
    list_processes,
    select_inherited,
    select_pod_variables,
)
from scheduler.domain.run_document import LaunchMode, MasterAddress, RankSeat, ResourceLimits, RunDocument

MASTER = MasterAddress("10.0.0.1", 29501)
MACHINE = MachineFacts(cores=64, gpu_ids={index: f"GPU-{index}" for index in range(8)})
PATHS = RunPaths(Path("/run/gen-3"), "/checkpoints", Path("/home/ada"), plan=Path("/run/gen-3/plan.json"))
JOB = RunDocument(
    job_id="llama/7b",
    owner="ada",
    node="node-b",
    generation=3,
    command=("python", "train.py"),
    nodes=2,
    node_rank=1,
    world_size=4,
    ranks=(RankSeat(2, 0, 6), RankSeat(3, 1, 1)),
    steps=1000,
    frozen_layers=2,
    checkpoint_step=40,
    checkpoint_interval_s=60.0,
    checkpoint_keep=3,
    url="http://127.0.0.1:8000",
    token="token",
)


def _build(
    job: RunDocument,
    *,
    machine: MachineFacts = MACHINE,
    seat: int = 1,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    environment = select_inherited(inherited or {})
    return build_environment(
        job, job.ranks[seat], MASTER, paths=PATHS, machine=machine, inherited=select_inherited(environment)
    )


def test_rank_gets_the_torchrun_contract() -> None:
    variables = _build(JOB)
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "NODE_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501", "TORCHELASTIC_RUN_ID": "llama/7b",
        "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    assert {name: variables.get(name) for name in expected} == expected
    assert int(variables["TORCHELASTIC_MAX_RESTARTS"]) > 1000


def test_rank_reads_the_same_values_back_through_the_library() -> None:
    read = read_rank_environment(_build(JOB))
    assert (read.rank, read.local_rank, read.world_size) == (3, 1, 4)
    assert (read.node, read.job_id, read.generation) == ("node-b", "llama/7b", 3)
    assert (read.store_host, read.store_port, read.uses_agent_store) == ("10.0.0.1", 29501, False)
    assert (read.url, read.token) == ("http://127.0.0.1:8000", "token")
    assert (read.plan_path, read.checkpoint_dir, read.run_dir) == (
        PATHS.plan,
        Path(PATHS.checkpoint_dir),
        PATHS.run_dir,
    )
    assert (read.steps_total, read.frozen_layers, read.checkpoint_step) == (1000, 2, 40)
    assert (read.checkpoint_interval_s, read.checkpoint_keep) == (60.0, 3)


def test_job_without_plan_and_interval_reads_back_as_such() -> None:
    job = replace(JOB, checkpoint_interval_s=None)
    variables = build_environment(
        job, job.ranks[0], MASTER, paths=replace(PATHS, plan=None), machine=MACHINE, inherited={}
    )
    read = read_rank_environment(variables)
    assert (read.plan_path, read.checkpoint_interval_s) == (None, float("inf"))


@pytest.mark.parametrize(
    ("vendor", "variable"),
    [
        (GpuVendor.NVIDIA, "CUDA_VISIBLE_DEVICES"),
        (GpuVendor.AMD, "ROCR_VISIBLE_DEVICES"),
        (GpuVendor.ASCEND, "ASCEND_RT_VISIBLE_DEVICES"),
    ],
)
def test_devices_follow_the_local_ranks(vendor: GpuVendor, variable: str) -> None:
    variables = _build(JOB, machine=replace(MACHINE, vendor=vendor))
    assert {name: value for name, value in variables.items() if "VISIBLE" in name} == {variable: "GPU-6,GPU-1"}


@pytest.mark.parametrize(
    ("vendor", "variable"), [(GpuVendor.AMD, "HIP_VISIBLE_DEVICES"), (GpuVendor.ASCEND, "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_gpus_without_identifiers_are_selected_by_number(vendor: GpuVendor, variable: str) -> None:
    machine = MachineFacts(cores=64, gpu_ids={index: str(index) for index in range(8)}, vendor=vendor)
    variables = _build(JOB, machine=machine)
    assert {name: value for name, value in variables.items() if "VISIBLE" in name} == {variable: "6,1"}


def test_machine_without_gpus_sets_no_devices() -> None:
    assert [name for name in _build(JOB, machine=MachineFacts(cores=2)) if "VISIBLE" in name] == []


def test_slots_of_processors_see_no_gpu_of_the_machine() -> None:
    variables = _build(replace(JOB, has_devices=False))
    assert [name for name in variables if "VISIBLE" in name] == []
    assert variables["EBBTIDE_GPUS"] == "6,1"


def test_gpu_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpu is 6.* are 0, 1\."):
        _build(JOB, machine=MachineFacts(cores=2, gpu_ids={0: "GPU-0", 1: "GPU-1"}))


@pytest.mark.parametrize(
    ("job", "machine", "threads"),
    [
        (JOB, MACHINE, "8"),
        (JOB, MachineFacts(cores=64), "32"),
        (JOB, MachineFacts(cores=1), "1"),
        (replace(JOB, limits=ResourceLimits(cpus=6.5)), MACHINE, "3"),
        (replace(JOB, limits=ResourceLimits(cpus=0.5)), MACHINE, "1"),
        (replace(JOB, env={"OMP_NUM_THREADS": "5"}), MACHINE, "5"),
    ],
)
def test_threads_are_the_ranks_share_of_the_cores(job: RunDocument, machine: MachineFacts, threads: str) -> None:
    assert _build(job, machine=machine)["OMP_NUM_THREADS"] == threads


def test_only_variables_of_the_machine_are_inherited() -> None:
    inherited = {"PATH": "/bin", "LC_ALL": "C", "TZ": "UTC", "https_proxy": "p", "EBBTIDE_SECRET": "s", "HOME": "/root"}
    variables = _build(JOB, inherited=inherited)
    assert {name: variables.get(name) for name in inherited} == {
        **inherited, "EBBTIDE_SECRET": None, "HOME": "/home/ada",
    }  # fmt: skip


def test_ranks_in_a_pod_inherit_its_variables_except_those_of_the_agent() -> None:
    pod = {"PATH": "/bin", "HOME": "/tmp", "WANDB_API_KEY": "w", "NCCL_DEBUG": "INFO"}
    own = {"EBBTIDE_TOKEN_FILE": "f", "TORCHELASTIC_RUN_ID": "x", "RANK": "9", "MASTER_PORT": "1"}
    assert select_pod_variables(pod | own) == pod


def test_job_overrides_the_machine_and_ebbtide_overrides_the_job() -> None:
    variables = _build(
        replace(JOB, env={"TZ": "CET", "HOME": "/data", "RANK": "9", "EBBTIDE_TOKEN": "x"}), inherited={"TZ": "UTC"}
    )
    assert [variables[name] for name in ("TZ", "HOME", "RANK", "EBBTIDE_TOKEN")] == ["CET", "/data", "3", "token"]


def test_virtual_environment_is_first_on_the_path_of_the_job() -> None:
    variables = _build(replace(JOB, venv="/home/ada/venv", env={"PATH": "/opt/bin"}), inherited={"PATH": "/usr/bin"})
    assert variables["PATH"] == "/home/ada/venv/bin:/opt/bin"
    assert variables["VIRTUAL_ENV"] == "/home/ada/venv"


def test_launch_by_node_starts_one_process_without_variables_of_a_rank() -> None:
    job = replace(JOB, launch=LaunchMode.NODE)
    assert list_processes(JOB) == JOB.ranks
    assert list_processes(job) == JOB.ranks[:1]
    variables = _build(job, seat=0)
    assert [name for name in variables if name.endswith(("RANK", "WORLD_SIZE")) or "TORCH" in name] == ["NODE_RANK"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-6,GPU-1"


def test_placeholders_are_filled_for_launchers_only() -> None:
    words = ("torchrun", "--nnodes={nnodes}", "{node_rank}", "{nproc_per_node}", "{master_addr}:{master_port}", "{}")
    job = replace(JOB, command=words)
    assert build_argv(job, MASTER, checkpoint_dir="/c") == words
    filled = ("torchrun", "--nnodes=2", "1", "2", "10.0.0.1:29501", "{}")
    assert build_argv(replace(job, launch=LaunchMode.NODE), MASTER, checkpoint_dir="/c") == filled


@pytest.mark.parametrize("launch", list(LaunchMode))
def test_directory_of_checkpoints_is_filled_in_for_every_command(launch: LaunchMode) -> None:
    job = replace(JOB, command=("python", "train.py", "--out={checkpoint_dir}/out"), launch=launch)
    assert build_argv(job, MASTER, checkpoint_dir="/c") == ("python", "train.py", "--out=/c/out")


def test_job_without_a_command_is_refused() -> None:
    with pytest.raises(ValueError, match="command"):
        build_argv(replace(JOB, command=()), MASTER, checkpoint_dir="/c")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "-m", "scheduler.trainer.train", "--size", "s"), True),
        (("python", "-m", "scheduler_of_mine"), False),
        (("python", "-m", "scheduler.train"), False),
        (("python", "scheduler/trainer/train.py"), False),
        (("/usr/bin/python", "-m", "scheduler.trainer.train"), False),
        ((), False),
    ],
)
def test_reference_trainer_is_recognized_by_its_module(command: tuple[str, ...], expected: bool) -> None:
    assert is_reference_trainer(command) is expected
