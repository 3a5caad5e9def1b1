"""Life of a run: prepared, started, ended, lost, and found again by another agent. Real supervisors and ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ebbtide
from scheduler.agent import container_process
from scheduler.agent.containment import ContainmentLevel, LevelName
from scheduler.agent.control_groups import ControlGroups
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.supervised_run import SupervisedPhase, SupervisedRun
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.run_document import LaunchMode, MasterAddress, ResourceLimits
from tests.agent.requirements import needs_bubblewrap, needs_root
from tests.agent.runs import (
    TestMachine,
    find_processes,
    python_job,
    read_output,
    wait_for,
    wait_for_end,
    wait_for_file,
)

pytestmark = needs_bubblewrap

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(60)"


def test_ranks_of_a_run_end_with_their_codes_and_tails(machine: TestMachine) -> None:
    script = "import os, sys; print('rank', os.environ['RANK']); sys.exit(3 * int(os.environ['RANK']))"
    run, state = machine.finish(python_job(script, ranks=2))
    assert state.phase is SupervisedPhase.ENDED
    assert state.exit_codes == {0: 0, 1: 3}
    assert state.tails == {1: "rank 1"}
    assert (state.failure, state.loss, state.oom_kills) == ("", "", 0)
    assert (run.folder.path / "ended").exists()


def test_port_of_a_prepared_run_is_reserved_for_rank_0(machine: TestMachine) -> None:
    script = """
        import os, socket
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", int(os.environ["MASTER_PORT"])))
        server.listen()
        client = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        print(int(client.getpeername()[1] == server.getsockname()[1]))
    """
    run = machine.prepare(python_job(textwrap.dedent(script)))
    port = wait_for(run, lambda state: state.is_prepared).port
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    run.start(MasterAddress("127.0.0.1", port))
    assert wait_for_end(run).exit_codes == {0: 0}
    assert read_output(run) == 1


def test_only_the_first_node_reserves_a_port(machine: TestMachine) -> None:
    run = machine.prepare(python_job(SLEEP, nodes=2, node_rank=1))
    assert wait_for(run, lambda state: state.is_prepared).port == 0


def test_launcher_gets_its_placeholders_and_no_variables_of_a_rank(machine: TestMachine) -> None:
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], sorted(os.environ)]))"
    words = ("{nnodes}", "--rank={node_rank}", "{nproc_per_node}", "{master_addr}:{master_port}", "{other}")
    job = python_job(script, ranks=2, launch=LaunchMode.NODE, nodes=2, node_rank=1)
    run, state = machine.finish(python_job(script, ranks=2, launch=LaunchMode.NODE, command=(*job.command, *words)))
    argv, variables = read_output(run)
    assert state.exit_codes == {0: 0}
    assert argv == ["1", "--rank=0", "2", f"127.0.0.1:{state.port}", "{other}"]
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & set(variables)


def test_modules_of_the_user_are_never_ebbtides(machine: TestMachine) -> None:
    working_dir = machine.working_dir("job-1")
    (working_dir / "scheduler.py").write_text("NAME = 'of the user'\n")
    (working_dir / "api").mkdir()
    (working_dir / "api" / "__init__.py").write_text("NAME = 'of the user'\n")
    (working_dir / "train.py").write_text(
        "import json, sys\n"
        "before = [name for name in sys.modules if name.partition('.')[0] in ('scheduler', 'api', 'ebbtide')]\n"
        "import api, scheduler\n"
        "print(json.dumps([before, scheduler.NAME, api.NAME]))\n"
    )
    run, state = machine.finish(python_job("", command=("python", "train.py")))
    assert state.exit_codes == {0: 0}
    assert read_output(run) == [[], "of the user", "of the user"]


def test_environment_of_the_agent_is_not_inherited(machine: TestMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_DATABASE_URL", "postgresql://admin")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    run, _ = machine.finish(python_job(script, env={"MINE": "1"}))
    variables = read_output(run)
    assert not {"EBBTIDE_DATABASE_URL", "AWS_SECRET_ACCESS_KEY"} & variables.keys()
    assert (variables["MINE"], variables["EBBTIDE_JOB_ID"]) == ("1", "job-1")


@pytest.mark.parametrize("command", [("no-such-program",), ("./missing.sh",), ("python", "\0")])
def test_command_that_cannot_be_executed_is_a_failure(machine: TestMachine, command: tuple[str, ...]) -> None:
    _, state = machine.finish(python_job("", ranks=2, command=command))
    assert state.has_ended
    assert "rank 0" in state.failure
    assert state.permanent_fault is PermanentFault.COMMAND_NOT_FOUND
    assert state.exit_codes == {}


def test_run_that_cannot_be_prepared_is_a_failed_run(machine: TestMachine) -> None:
    folder = machine.folders.folder("job-1", 1, "node-1")
    run = SupervisedRun.record_failure(python_job(SLEEP), folder, "the archive is truncated")
    assert run.poll().has_ended
    assert run.poll().failure == "the archive is truncated"
    assert SupervisedRun.recover(folder).poll() == run.poll()
    run.settle()


def test_sigterm_reaches_the_children_of_ranks(machine: TestMachine) -> None:
    script = """
        import os, signal, subprocess, sys, time
        child = subprocess.Popen(["sleep", "4323.5"])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5 - child.wait()))
        open("ready", "w").close()
        time.sleep(60)
    """
    run = machine.begin(python_job(textwrap.dedent(script)))
    wait_for_file(machine.working_dir("job-1") / "ready")
    run.terminate()
    assert wait_for_end(run).exit_codes == {0: 5 + signal.SIGTERM}


def test_prepared_run_can_be_discarded(machine: TestMachine) -> None:
    run = machine.prepare(python_job(SLEEP))
    wait_for(run, lambda state: state.is_prepared)
    run.terminate()
    state = wait_for_end(run)
    assert (state.exit_codes, state.failure) == ({}, "")
    run.settle()
    assert run.folder.is_settled
    assert not run.folder.temporary_path.exists()


def test_supervisor_outlives_the_agent_and_another_agent_finds_the_run(machine: TestMachine, tmp_path: Path) -> None:
    script = "import os, sys, time; time.sleep(1.0); sys.exit(7)"
    document = tmp_path / "document.json"
    document.write_text(python_job(script).to_json())
    agent = """
        import os, signal, sys
        from pathlib import Path
        from scheduler.domain.run_document import RunDocument
        from tests.agent.runs import TestMachine
        machine = TestMachine(Path(sys.argv[1]))
        machine.begin(RunDocument.from_json(Path(sys.argv[2]).read_text()))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    other = tmp_path / "other"
    other.mkdir()
    started = subprocess.run([sys.executable, "-c", textwrap.dedent(agent), other, document], cwd=ROOT, check=False)
    assert started.returncode == -signal.SIGKILL
    [folder] = AgentFolders(other / "state").list_unsettled()
    run = SupervisedRun.recover(folder)
    machine.runs.append(run)
    assert run.has_begun
    assert not run.poll().has_ended
    assert wait_for_end(run).exit_codes == {0: 7}


def test_run_whose_agent_died_before_recording_the_process_is_found(machine: TestMachine) -> None:
    run = machine.begin(python_job(SLEEP))
    record = run.folder.read_record("supervisor.json")
    run.folder.write_record("supervisor.json", {**record, "pid": 0, "start_ticks": 0})
    recovered = SupervisedRun.recover(run.folder)
    recovered.kill()
    assert wait_for_end(recovered).has_ended
    assert run.poll().has_ended
    assert run.folder.read_record("supervisor.json") == record


@pytest.fixture
def slow_machine(machine: TestMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestMachine:
    """A machine without control groups, whose containers start more slowly than the agent waits."""
    slow = tmp_path / "bwrap"
    slow.write_text(f'#!/bin/sh\nsleep 0.6\nexec {machine.containment.bwrap} "$@"\n')
    slow.chmod(0o755)
    machine.containment = replace(machine.containment, bwrap=str(slow), groups=ControlGroups())
    monkeypatch.setattr(container_process, "_START_TIMEOUT_S", 0.1)
    return machine


def test_slow_container_is_found_and_can_be_killed(slow_machine: TestMachine) -> None:
    run = slow_machine.prepare(python_job(SLEEP))
    assert run.supervisor_pid == 0
    wait_for(run, lambda state: state.is_prepared)
    assert run.folder.read_record("supervisor.json")["pid"] == run.supervisor_pid != 0
    run.kill()
    assert wait_for_end(run).has_ended


def test_container_is_killed_before_its_supervisor_exists(slow_machine: TestMachine) -> None:
    run = slow_machine.prepare(python_job(SLEEP))
    run.kill()
    began_s = time.monotonic()
    assert wait_for_end(run).has_ended
    assert (run.supervisor_pid, time.monotonic() < began_s + 0.4) == (0, True)


def test_killed_supervisor_leaves_no_process(machine: TestMachine) -> None:
    script = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '4324.5']); time.sleep(4324)"
    run = machine.begin(python_job(script, ranks=2))
    deadline_s = time.monotonic() + 10
    while len(find_processes("4324.5")) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os.kill(run.folder.read_record("supervisor.json")["pid"], signal.SIGKILL)
    state = wait_for_end(run)
    assert find_processes("4324.5") == []
    assert state.loss == "the supervisor was killed"
    assert state.exit_codes == {}


def test_signals_never_reach_a_process_that_got_the_same_id(machine: TestMachine) -> None:
    run = machine.prepare(python_job(SLEEP))
    record = run.folder.read_record("supervisor.json")
    wait_for(run, lambda state: state.is_prepared)  # the process below starts in a later tick
    with subprocess.Popen(["sleep", "60"]) as bystander:
        run.folder.write_record("supervisor.json", {**record, "pid": bystander.pid, "control_groups": {}})
        SupervisedRun.recover(run.folder).kill()
        time.sleep(0.05)
        assert bystander.poll() is None
        bystander.kill()
    assert not run.poll().has_ended


def test_ranks_are_killed_when_the_lease_ends(machine: TestMachine) -> None:
    lease = machine.state / "lease"
    lease.write_text(f"{time.clock_gettime(time.CLOCK_BOOTTIME) + 60:020.3f}\n")
    run = machine.begin(python_job(SLEEP), lease=lease)
    assert wait_for(run, lambda state: state.phase is SupervisedPhase.RUNNING).loss == ""
    with lease.open("r+") as file:
        file.write(f"{0:020.3f}\n")
    state = wait_for_end(run)
    assert state.exit_codes == {0: -signal.SIGKILL}
    assert "contact" in state.loss


def test_status_of_a_rank_is_read_and_an_invalid_one_ignored(machine: TestMachine) -> None:
    script = """
        import json, os, time
        folder = os.environ["EBBTIDE_RUN_DIR"]
        def write(text):
            with open(folder + "/part", "w") as file:
                file.write(text)
            os.replace(folder + "/part", folder + "/status-0.json")
        write(json.dumps({"phase": "running", "step": 7}))
        while not os.path.exists("seen"):
            time.sleep(0.01)
        write("[" * 100000)
    """
    run = machine.begin(python_job(textwrap.dedent(script)))
    assert wait_for(run, lambda state: bool(state.statuses)).statuses[0].step == 7
    (machine.working_dir("job-1") / "seen").touch()
    assert wait_for_end(run).statuses[0].step == 7


def test_reference_trainer_is_forked_from_preloaded_modules(machine: TestMachine) -> None:
    command = ("python", "-m", "scheduler.trainer.train", "--help")
    run, state = machine.finish(python_job("", ranks=2, command=command), preload=("numpy.linalg",))
    assert state.exit_codes == {0: 0, 1: 0}
    assert run.folder.read_record("prepared.json")["loaded"] == ["numpy.linalg"]
    assert run.folder.read_record("started.json")["is_forked"], "libraries of the modules have started threads"
    assert "--ledger" in run.folder.log_path(1).read_text()


def test_generation_never_begins_twice(machine: TestMachine) -> None:
    machine.prepare(python_job(SLEEP))
    with pytest.raises(FileExistsError):
        machine.prepare(python_job(SLEEP))


def test_limits_of_the_machine_hold_for_jobs_without_limits(machine: TestMachine) -> None:
    run = machine.prepare(python_job(SLEEP, limits=ResourceLimits(cpus=0.5)))
    groups = {name: Path(path) for name, path in run.folder.read_record("supervisor.json")["control_groups"].items()}
    limits = {
        path.name: path.read_text().split()
        for group in groups.values()
        for path in group.glob("*")
        if path.name in ("pids.max", "cpu.max", "cpu.cfs_quota_us")
    }
    assert limits["pids.max"] == ["16384"]
    assert limits.get("cpu.max", limits.get("cpu.cfs_quota_us")) in (["50000", "100000"], ["50000"])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as created:
        path = Path(created).resolve()
        path.chmod(0o755)
        yield path


def _create_system_venv(path: Path) -> Path:
    """Create a virtual environment of the system's interpreter, in which this project is installed."""
    system = Path("/usr/bin/python3")
    if not system.exists():
        pytest.skip("an agent of another user needs an interpreter that it can read: /usr/bin/python3 is missing")
    subprocess.run([system, "-m", "venv", "--without-pip", path], check=True)
    [site_packages] = path.glob("lib/python3.*/site-packages")
    if site_packages.parent.name < "python3.11":
        pytest.skip(f"Ebbtide needs Python 3.11 or later; the system has {site_packages.parent.name}")
    packages = {ROOT, Path(ebbtide.__file__).parents[1]}
    (site_packages / "ebbtide.pth").write_text("".join(f"{package}\n" for package in packages))
    return path / "bin" / "python"


@needs_root
def test_agent_without_root_contains_runs_by_a_user_namespace(open_folder: Path) -> None:
    agent = """
        import json, os, sys
        from pathlib import Path
        from tests.agent.runs import TestMachine, python_job
        machine = TestMachine(Path(sys.argv[1]))
        (machine.secrets / "secret").touch()
        script = f"import json, os; print(json.dumps([len(os.listdir('/proc')), os.listdir({str(machine.secrets)!r})]))"
        run, state = machine.finish(python_job(script))
        level = machine.containment.level
        print(json.dumps([level.name, level.missing, state.exit_codes, run.folder.log_path(0).read_text()]))
        machine.close()
    """
    python, own = _create_system_venv(open_folder / "venv"), open_folder / "own"
    own.mkdir()
    os.chown(own, 65534, 65534)
    script = [str(python), "-c", textwrap.dedent(agent), str(own)]
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    level, missing, codes, output = json.loads(done.stdout)
    assert level == "partial", missing
    assert any("a separate user" in reason for reason in missing)
    assert codes == {"0": 0}
    assert json.loads(output)[1] == []


@needs_root
def test_virtual_environment_in_a_closed_home_is_used(machine: TestMachine, tmp_path: Path) -> None:
    venv = tmp_path / "home" / "venv"
    _create_system_venv(venv)
    venv.parent.chmod(0o700)
    script = "import json, os, sys; print(json.dumps([sys.prefix, os.listdir(os.path.dirname(sys.prefix))]))"
    (venv.parent / "private").touch()
    run, state = machine.finish(python_job(script, venv=str(venv)))
    assert state.exit_codes == {0: 0}
    assert read_output(run) == [str(venv), ["venv"]]
    with pytest.raises(ValueError, match="venv"):
        machine.prepare(python_job(script, job_id="other", venv=str(tmp_path)))


def test_without_namespaces_a_run_still_ends_as_a_whole(open_folder: Path) -> None:
    machine = TestMachine(open_folder)
    if "unified" not in machine.containment.groups.bases:
        pytest.skip("the machine has no control groups of version 2, which end a run without namespaces at once")
    machine.containment = replace(machine.containment, bwrap="", level=ContainmentLevel(LevelName.NONE))
    script = "import subprocess, sys, time; subprocess.Popen(['setsid', 'sleep', '4325.5']); time.sleep({})"
    _, state = machine.finish(python_job(script.format(0.1), job_id="ends"))
    assert (state.exit_codes, state.failure) == ({0: 0}, "")
    assert find_processes("4325.5") == []
    run = machine.begin(python_job(script.format(60), job_id="is-killed"))
    wait_for(run, lambda _: find_processes("4325.5") != [])
    run.kill()
    assert wait_for_end(run).exit_codes == {}
    assert find_processes("4325.5") == []
    machine.close()
