"""`python -I -m scheduler.agent.pod_daemon`: the node agent of one job on one node, inside a pod. `pod` starts it.

It differs from the agent of a machine in its identity, in the containment, which is the pod, and in its end: it leaves
once its job has ended, and on SIGTERM its ranks have the grace period of the pod to save and exit. The output of ranks
goes to its standard output, where `kubectl logs` shows it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scheduler.agent.agent_state import AgentState
from scheduler.agent.containment import Containment
from scheduler.agent.daemon import PRELOAD, build_agent
from scheduler.agent.log_forwarder import LogForwarder
from scheduler.agent.machine_agent import JobEnd
from scheduler.agent.pod import DONE, INVALID_ENVIRONMENT, JOB_FAILED
from scheduler.agent.pod_environment import PodEnvironment, PodIdentity, find_certificates, read_pod_environment
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_launcher import RunLauncher
from scheduler.agent.run_retention import RetentionLimits
from scheduler.domain.machine import MachineInventory

logger = logging.getLogger("scheduler.agent.pod_daemon")

_FINAL_REPORT_S = 2.0
"""Part of the grace period that is left for the last report."""
_CANNOT_START = 1


def main() -> int:
    arguments = _parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    os.environ.update(find_certificates())  # of this process: ranks get the variables of the pod
    try:
        environment = read_pod_environment(os.environ)
        environment.token_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        return INVALID_ENVIRONMENT
    try:
        return run_pod_agent(
            environment, preload=arguments.preload or PRELOAD, stopping_since_s=arguments.stopping_since
        )
    except (OSError, ValueError) as error:
        logger.error("The agent cannot start: %s", error)
        return _CANNOT_START


def run_pod_agent(environment: PodEnvironment, *, preload: Sequence[str], stopping_since_s: float | None) -> int:
    """Serve until the job has ended, or until SIGTERM and the end of the ranks. Return the exit code.

    Args:
        stopping_since_s: when the pod got SIGTERM, on the monotonic clock, if an earlier agent has died since.

    Raises:
        OSError: the state folder cannot be written, or no address reaches the control plane.
    """
    state = AgentState(environment.state)
    identity = PodIdentity.of(environment)
    containment = Containment.of_pod()
    logger.info("containment: %s", containment.level)
    # Kubernetes has chosen the GPUs: the container sees those of the job only, numbered from 0.
    inventory = MachineInventory(cpus=read_cpu_limit() or 1)
    launcher = RunLauncher(
        state,
        identity,
        containment,
        inventory,
        preload=preload,
        default_directory=Path.cwd(),
        checkpoint_dir=environment.checkpoint_dir,
    )
    leave_within_s = environment.grace_s - _FINAL_REPORT_S
    if stopping_since_s is not None:
        leave_within_s -= time.monotonic() - stopping_since_s
    agent = build_agent(
        state,
        identity,
        launcher,
        output=LogForwarder(sys.stdout.buffer, AgentFolders(state.root).list_folders()),
        limits=RetentionLimits(),
        leave_within_s=max(0.0, leave_within_s),
    )
    if stopping_since_s is not None:
        agent.stop()
    return JOB_FAILED if agent.serve() is JobEnd.FAILED else DONE


def read_cpu_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the whole CPUs that the pod may use, at least 1; 0 without a limit."""
    for read in (_read_limit_v2, _read_limit_v1):
        with suppress(OSError, ValueError):
            quota, period = read(root)
            return max(1, quota // period) if quota > 0 else 0
    return 0


def _read_limit_v2(root: Path) -> tuple[int, int]:
    quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
    return (0, 1) if quota == "max" else (int(quota), int(period))


def _read_limit_v1(root: Path) -> tuple[int, int]:
    quota, period = root / "cpu/cpu.cfs_quota_us", root / "cpu/cpu.cfs_period_us"
    return int(quota.read_text(encoding="ascii")), int(period.read_text(encoding="ascii"))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.agent.pod_daemon", description="Run the ranks of a pod.")
    parser.add_argument(
        "--preload",
        action="append",
        metavar="MODULE",
        help="module that supervisors load (default: the modules of the reference trainer)",
    )
    parser.add_argument(
        "--stopping-since", type=float, metavar="SECONDS", help="when the pod got SIGTERM, on the monotonic clock"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
