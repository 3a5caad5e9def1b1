"""Attacks of a job on its machine, each by a real process in a real container."""

from __future__ import annotations

import os
import pwd
import re
import signal
import stat
import time
from pathlib import Path

import pytest

from scheduler.agent import containment
from scheduler.agent.containment import (
    Containment,
    ContainmentError,
    ContainmentPolicy,
    LevelName,
)
from tests.agent.requirements import needs_root
from tests.agent.runs import (
    LIMITS,
    TestMachine,
    find_processes,
    python_job,
    read_output,
    wait_for,
    wait_for_end,
)

pytestmark = needs_root
ROOT = Path(__file__).parents[2]

_READ = """
import json, os, sys
def read(path):
    try:
        return open(path).read()
    except OSError as error:
        return type(error).__name__
environments = [read(f"/proc/{pid}/environ") for pid in os.listdir("/proc") if pid.isdigit()]
print(json.dumps({
    "leaks": [text for text in environments if "SERVICE_SECRET" in text],
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "files": [read(path) for path in sys.argv[1:]],
    "jobs": os.listdir(os.environ["EBBTIDE_RUN_DIR"] + "/../.."),
    "uid": os.getuid(),
    "capabilities": [line for line in open("/proc/self/status") if line.startswith("CapEff")],
}))
"""

_WRITE = """
import json, os, sys
def attempt(path):
    try:
        with open(path, "w") as file:
            file.write("attack")
        return "written"
    except OSError as error:
        return type(error).__name__
print(json.dumps([attempt(path) for path in sys.argv[1:]]))
"""


def test_machine_reaches_the_full_level(machine: TestMachine) -> None:
    level = machine.containment.level
    assert (level.name, level.missing, level.network) == (LevelName.FULL, (), "shared")
    user = machine.containment.policy.find_user("", "")
    assert user is not None
    assert (level.shared_user, user.name in str(level)) == (user.name, True)


def test_hidden_file_in_a_hidden_folder_does_not_lower_the_level(tmp_path: Path) -> None:
    """A service that starts again has its token secret and the agent's state in its run folder."""
    run = tmp_path / "run"
    (run / "agent").mkdir(parents=True)
    secret = run / "token.secret"
    secret.write_text("secret")
    found = Containment.detect(ContainmentPolicy(), hidden=[run / "agent", run, secret])
    assert (found.level.name, found.hidden) == (LevelName.FULL, (run,))


def test_user_of_jobs_that_owns_a_visible_folder_of_the_service_lowers_the_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containment, "SERVICE_FOLDER", tmp_path)
    os.chown(tmp_path, pwd.getpwnam("nobody").pw_uid, -1)
    policy = ContainmentPolicy(users={"ada": "nobody"}, default_user="nobody")
    visible = Containment.detect(policy, hidden=[]).level
    assert (visible.name, [str(tmp_path) in reason for reason in visible.missing]) == (LevelName.PARTIAL, [True])
    for hidden in (tmp_path, tmp_path.parent):
        assert Containment.detect(policy, hidden=[hidden]).level.name is LevelName.FULL


def test_units_keep_the_service_from_jobs_of_its_machine() -> None:
    """Both units on one machine: jobs have another user than the service, and do not see its folder."""
    service, agent = ((ROOT / "deploy" / name).read_text() for name in ("ebbtide.service", "ebbtide-agent.service"))
    (user,) = re.findall(r"^User=(.*)$", service, re.MULTILINE)
    (folder,) = re.findall(r"^StateDirectory=(.*)$", service, re.MULTILINE)
    (command,) = re.findall(r"^ExecStart=(.*)$", agent, re.MULTILINE)
    assert user not in containment.DEFAULT_USERS
    assert Path("/var/lib", folder) == containment.SERVICE_FOLDER
    assert f"--hide {containment.SERVICE_FOLDER} " in command


def test_service_secrets_and_other_jobs_cannot_be_read(machine: TestMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_SECRET", "postgresql://admin")
    database, secret = machine.secrets / "ebbtide.db", machine.secrets / "token-secret"
    for path in (database, secret):
        path.write_text("secret")
        path.chmod(0o666)  # the containers hide it, not its mode
    other = machine.begin(python_job("import time; time.sleep(60)", job_id="other", env={"SERVICE_SECRET": "its own"}))
    files = [database, secret, other.folder.path / "run.json", other.folder.log_path(0), Path("/etc/shadow")]
    job = python_job(_READ)
    run, state = machine.finish(python_job(_READ, command=(*job.command, *map(str, files))))
    seen = read_output(run)
    assert state.exit_codes == {0: 0}
    assert seen["leaks"] == []
    assert seen["processes"] == 2
    assert seen["files"] == ["FileNotFoundError"] * 4 + ["PermissionError"]
    assert seen["jobs"] == ["job-1"]
    assert seen["uid"] != 0
    assert seen["capabilities"] == ["CapEff:\t0000000000000000\n"]


def test_nothing_outside_of_the_jobs_folders_can_be_written(machine: TestMachine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    outside = [tmp_path / "file", Path("/etc/ebbtide-attack"), Path("/var/tmp/ebbtide-attack"), machine.state / "lease"]
    inside = [machine.working_dir("job-1") / "file", machine.folders.checkpoint_dir("job-1") / "file"]
    job = python_job(_WRITE)
    run, state = machine.finish(python_job(_WRITE, command=(*job.command, *map(str, (*outside, *inside)))))
    outcomes = read_output(run)
    assert state.exit_codes == {0: 0}
    assert [path for path in outside if path.exists()] == []
    assert outcomes[4:] == ["written", "written"]
    assert [path.read_text() for path in inside] == ["attack", "attack"]


@pytest.mark.parametrize("cancels", [1, pytest.param(1000, marks=pytest.mark.full)])
def test_daemons_of_a_job_die_when_it_is_killed(machine: TestMachine, cancels: int) -> None:
    script = "import os, subprocess, time; subprocess.Popen(['setsid', 'env', '-i', 'sleep', '4321.5']); time.sleep(60)"
    for number in range(cancels):
        run = machine.begin(python_job(script, job_id=f"job{number}"))
        deadline_s = time.monotonic() + 10
        while not find_processes("4321.5") and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert find_processes("4321.5") != []
        run.kill()
        assert wait_for_end(run).has_ended
        assert find_processes("4321.5") == []
        run.settle()


def test_daemons_of_a_job_die_with_its_last_rank(machine: TestMachine) -> None:
    script = "import subprocess; subprocess.Popen(['setsid', 'env', '-i', 'sleep', '4322.5'])"
    _, state = machine.finish(python_job(script))
    assert state.exit_codes == {0: 0}
    assert find_processes("4322.5") == []


def test_fork_bomb_stops_at_the_limit_of_processes(machine: TestMachine) -> None:
    script = """
import os, time
count = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
    except BlockingIOError:
        break
    count += 1
print(count)
"""
    run, state = machine.finish(python_job(script))
    assert state.exit_codes == {0: 0}
    assert LIMITS.processes is not None
    assert 20 < read_output(run) < LIMITS.processes


def test_memory_beyond_the_limit_ends_that_job_alone(machine: TestMachine) -> None:
    other = machine.begin(python_job("import time; time.sleep(60)", job_id="other"))
    _, state = machine.finish(python_job("data = bytearray(1 << 30)"))
    assert state.exit_codes == {0: -signal.SIGKILL}
    assert (state.oom_kills or 0) >= 1
    assert not other.poll().has_ended
    assert other.poll().oom_kills == 0


def test_rank_cannot_forge_records_or_lead_the_agent_through_links(machine: TestMachine) -> None:
    victim = machine.secrets / "victim"
    victim.write_text("{}")
    script = f"""
import json, os, time
os.chdir(os.environ["EBBTIDE_RUN_DIR"])
outcomes = []
for name in ("supervisor.json", "run.json", "started.json", "rank-0.log"):
    try:
        os.unlink(name)
        outcomes.append("removed")
    except OSError as error:
        outcomes.append(type(error).__name__)
os.mkdir("exit-0.json")
os.mkdir("notice.json")
json.dump({{"code": 0}}, open("exit-7.json", "w"))
os.symlink("{victim}", "status-0.json")
open("ended", "w").write("{{}}")
try:
    os.kill(1, 9)
except PermissionError:
    outcomes.append("not killed")
print(json.dumps(outcomes), flush=True)
while not os.path.isfile("notice.json"):
    time.sleep(0.01)
raise SystemExit(3)
"""
    run = machine.begin(python_job(script))
    wait_for(run, lambda _: run.folder.log_path(0).exists() and run.folder.log_path(0).stat().st_size > 0)
    assert not run.poll().has_ended
    run.write_notice("leave", seconds_left=5.0)
    state = wait_for_end(run)
    assert state.exit_codes == {0: 3}
    assert state.statuses == {}
    assert read_output(run) == [*["PermissionError"] * 4, "not killed"]
    assert victim.read_text() == "{}"


def test_folders_of_the_agent_are_closed_to_other_users(machine: TestMachine) -> None:
    run, _ = machine.finish(python_job("pass"))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in run.folder.path.iterdir() if path.is_file()}
    assert [path for path, mode in modes.items() if mode & 0o077] == []
    assert stat.S_IMODE(run.folder.path.parent.stat().st_mode) == 0o700


def test_job_cannot_name_a_checkpoint_directory_of_the_service(machine: TestMachine) -> None:
    for path in (machine.secrets, machine.state / "jobs" / "other", machine.state.parent, Path("/")):
        with pytest.raises(ContainmentError):
            machine.prepare(python_job("pass", checkpoint_dir=str(path)))


def test_checkpoint_directory_of_another_user_is_refused(machine: TestMachine, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ValueError, match="chown"):
        machine.prepare(python_job("pass", checkpoint_dir=str(closed)))
    with pytest.raises(ValueError, match="chown"):
        machine.prepare(python_job("pass", checkpoint_dir=str(closed / "deeper")))


def test_object_store_reaches_ranks_and_creates_no_folder(machine: TestMachine) -> None:
    script = "import json, os; print(json.dumps([os.environ['EBBTIDE_CHECKPOINT_DIR'], os.listdir('.')]))"
    run, _ = machine.finish(python_job(script, checkpoint_dir="s3://runs/a"))
    assert read_output(run) == ["s3://runs/a", []]
    assert not machine.folders.checkpoint_dir("job-1").exists()
