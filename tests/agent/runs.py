"""Real runs of a test: a machine with its state folder, and jobs that are small Python scripts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler.agent.containment import Containment, ContainmentPolicy
from scheduler.agent.control_groups import ControlGroups
from scheduler.agent.rank_environment import MachineFacts
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_site import RunSite
from scheduler.agent.supervised_run import RunState, SupervisedPhase, SupervisedRun
from scheduler.domain.run_document import MasterAddress, RankSeat, ResourceLimits, RunDocument

TIMEOUT_S = 20.0
POLL_S = 0.005
LIMITS = ResourceLimits(memory_bytes=256 << 20, processes=64)


class TestMachine:
    """A machine with one agent's state folder. `close` kills what a failed test has left."""

    __test__ = False

    def __init__(self, root: Path, *, policy: ContainmentPolicy | None = None) -> None:
        self.state = root / "state"
        self.state.mkdir()
        self.secrets = root / "service"
        self.secrets.mkdir()
        self.folders = AgentFolders(self.state)
        self.containment = Containment.detect(
            policy or ContainmentPolicy(), hidden=[self.state, self.secrets], groups=ControlGroups.detect()
        )
        self.runs: list[SupervisedRun] = []

    def prepare(
        self, document: RunDocument, *, lease: Path | None = None, preload: tuple[str, ...] = ()
    ) -> SupervisedRun:
        """Prepare a run in a working directory of its own."""
        working_dir = self.working_dir(document.job_id)
        checkpoints = self.folders.checkpoint_dir(document.job_id)
        site = RunSite(working_dir, checkpoints, MachineFacts(cores=2), lease=lease)
        folder = self.folders.folder(document.job_id, document.generation, document.node)
        run = SupervisedRun.prepare(document, folder, self.containment, site, preload=preload)
        self.runs.append(run)
        return run

    def begin(self, document: RunDocument, **options: Any) -> SupervisedRun:
        """Prepare a run, and start its ranks as soon as it is prepared."""
        run = self.prepare(document, **options)
        state = wait_for(run, lambda state: state.phase is not SupervisedPhase.PREPARING)
        run.start(MasterAddress("127.0.0.1", state.port or 29500))
        return run

    def finish(self, document: RunDocument, **options: Any) -> tuple[SupervisedRun, RunState]:
        """Run a job to its end."""
        run = self.begin(document, **options)
        return run, wait_for_end(run)

    def working_dir(self, job_id: str) -> Path:
        path = self.state / "directories" / job_id
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        return path

    def close(self) -> None:
        for run in self.runs:
            run.kill()
            wait_for_end(run)
            run.settle()


def create_machine(root: Path) -> Iterator[TestMachine]:
    machine = TestMachine(root)
    yield machine
    machine.close()


def python_job(script: str, *, ranks: int = 1, **fields: Any) -> RunDocument:
    """Return the document of a job that runs a script in the first `python` of PATH."""
    document = RunDocument(
        job_id="job-1",
        owner="somebody",
        node="node-1",
        generation=1,
        command=("python", "-c", script),
        nodes=1,
        node_rank=0,
        world_size=ranks,
        ranks=tuple(RankSeat(rank, rank, rank) for rank in range(ranks)),
        limits=LIMITS,
    )
    return replace(document, **fields)


def wait_for(run: SupervisedRun, condition: Callable[[RunState], bool]) -> RunState:
    """Poll until the condition holds or the run has ended, and return the state."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        state = run.poll()
        if condition(state) or state.has_ended:
            return state
        time.sleep(POLL_S)
    raise TimeoutError(f"{run}: {run.poll()}; {run.folder.read_supervisor_errors()}")


def wait_for_end(run: SupervisedRun) -> RunState:
    return wait_for(run, lambda state: state.has_ended)


def wait_for_file(path: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(path)
        time.sleep(POLL_S)


def read_output(run: SupervisedRun, rank: int = 0) -> Any:
    """Return the JSON document that a rank has printed."""
    return json.loads(run.folder.log_path(rank).read_text())


def find_processes(mark: str) -> list[int]:
    """Return the processes whose command line has an argument `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            found.append(int(path.parent.name))
    return found
