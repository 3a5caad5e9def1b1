"""The agent in a pod, as processes, against a fake API."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

import psutil
import pytest

from api.worker_reports import TEXT_LENGTH_MAX
from scheduler.domain.run_document import LaunchMode
from tests.contract.agent_pod import OBEY, PATH, STUBBORN, Pod, agent_pod
from tests.processes import find_run_processes, kill_tree

SEES_NOTHING_OF_THE_FIRST = """
    import json, os, pathlib, psutil
    first = pathlib.Path(os.environ["EBBTIDE_RUN_DIR"]).with_name("gen-1@n0")
    for process in psutil.process_iter():
        try:
            assert process.environ().get("EBBTIDE_RUN_DIR") != str(first), process
        except psutil.Error:
            pass
    assert [json.loads((first / f"status-{rank}.json").read_text())["phase"] for rank in (0, 1)] == ["left", "left"]
"""
LEAVES_A_CHILD = (
    """
    import os, subprocess
    if os.environ["RANK"] == "0":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""
    + STUBBORN
)
LEAVE = {"action": "leave", "step": None, "seconds_left": None}


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with agent_pod(tmp_path) as created:
        yield created


def test_ranks_are_prepared_begun_reported_and_replaced(pod: Pod) -> None:
    pod.wait(lambda: bool(pod.desk.reports))
    first = {"pod": "p1", "address": "127.0.0.1", "runs": []}
    assert {name: value for name, value in pod.desk.report.items() if name != "wait_s"} == first
    assert set(pod.desk.requests) == {("/base/v1/jobs/a%2Fb/agents/n0", "Bearer eba_secret")}
    pod.order(OBEY)
    pod.wait_until_running()
    pod.desk.notice = {"action": "replan", "step": None, "seconds_left": 50.0}
    pod.wait(lambda: pod.codes() == [0, 0])
    assert [rank["status"]["phase"] for rank in pod.last()["ranks"]] == ["left", "left"]
    pod.order(STUBBORN, generation=2, ranks=1)
    pod.wait_until_running(1, generation=2)
    pod.process.send_signal(signal.SIGTERM)
    pod.end(0)
    assert pod.codes(2) == [-9]
    assert "deadline" in pod.last(2)["killed"]


def test_newer_generation_is_prepared_while_the_older_one_runs_and_begins_after_it(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait_until_running()
    pod.order(SEES_NOTHING_OF_THE_FIRST, generation=2, ranks=1)
    pod.wait(lambda: pod.desk.run.get("prepared") == 2)
    assert pod.codes() == [None, None], "the older ranks train on"
    assert pod.desk.run["master_port"] > 0
    pod.desk.notice = {"action": "replan", "step": None, "seconds_left": 50.0}
    pod.wait(lambda: pod.codes(2) not in ([], [None]))
    assert pod.codes(2) == [0], pod.last(2)["ranks"][0]["tail"]
    assert pod.codes(1) == [0, 0], "its end was told before"


def test_killed_agent_restarts_no_rank(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait_until_running()
    ranks = [process.pid for process in find_run_processes(pod.folder / "run")]
    killed = pod.agent
    killed.kill()
    pod.wait(lambda: not killed.is_running())
    before = len(pod.desk.reports)
    pod.wait(lambda: len(pod.desk.reports) > before + 2)
    assert pod.desk.run["generation"] == 1
    assert pod.codes() == [None, None]
    assert [process.pid for process in find_run_processes(pod.folder / "run")] == ranks
    assert pod.agent.pid != killed.pid
    pod.desk.notice = LEAVE
    pod.wait(lambda: pod.codes() == [0, 0])
    pod.desk.ending = {"done": True, "failed": False}
    pod.end(0)
    assert pod.log().count("rank 0 | ") == 0, "ranks that print nothing"


def test_end_of_ranks_without_an_agent_is_reported_by_the_next(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait_until_running()
    pod.agent.kill()
    (pod.run_dir() / "notice.json").write_text("{}")
    pod.wait(lambda: pod.codes() == [0, 0])
    assert [rank["status"]["phase"] for rank in pod.last()["ranks"]] == ["left", "left"]


def test_agent_killed_after_sigterm_still_lets_the_ranks_leave(pod: Pod) -> None:
    pod.order(STUBBORN, ranks=1)
    pod.wait_until_running(1)
    pod.process.send_signal(signal.SIGTERM)
    pod.wait(lambda: (pod.run_dir() / "notice.json").exists())
    pod.agent.kill()
    pod.end(0)
    assert "deadline" in pod.last()["killed"]


def test_kill_order_kills_the_ranks(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait_until_running()
    pod.desk.kill = "rank 7 was killed by SIGSEGV"
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.last()["killed"] == "", "that was not its own decision"
    assert pod.process.poll() is None


def test_child_of_a_rank_ends_with_the_run_even_if_the_supervisor_was_killed(pod: Pod) -> None:
    pod.order(LEAVES_A_CHILD)
    pod.wait_until_running()
    supervisor = json.loads((pod.run_dir() / "supervisor.json").read_text())["pid"]
    assert [process.name() for process in find_run_processes(pod.folder / "run")].count("sleep") == 1
    psutil.Process(supervisor).kill()
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.last()["killed"] == "the supervisor was killed"
    assert not find_run_processes(pod.folder / "run")
    pod.order(OBEY, generation=2, ranks=1)
    pod.wait_until_running(1, generation=2)


def test_ranks_continue_during_an_api_outage_logged_once(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait_until_running()
    pod.desk.is_reachable, before = False, len(pod.desk.requests)
    pod.wait(lambda: len(pod.desk.requests) > before + 3)
    assert pod.log().count("Cannot reach the control plane") == 1
    pod.desk.notice, pod.desk.is_reachable = LEAVE, True
    pod.wait(lambda: pod.codes() == [0, 0])
    assert "reachable again" in pod.log()


def test_ranks_without_contact_for_the_lease_are_ended(pod: Pod) -> None:
    pod.desk.disconnect_s = 1.5
    pod.order(STUBBORN)
    pod.wait_until_running()
    pod.desk.is_reachable = False
    pod.wait(lambda: (pod.run_dir() / "loss.json").exists())
    pod.desk.is_reachable, pod.desk.disconnect_s = True, 600.0
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert "no contact" in pod.last()["killed"]


def test_ranks_without_contact_save_before_the_lease_ends(pod: Pod) -> None:
    pod.desk.disconnect_s = 4.0
    pod.order(OBEY)
    pod.wait_until_running()
    pod.desk.is_reachable = False
    pod.wait(lambda: (pod.run_dir() / "ended").exists())
    assert json.loads((pod.run_dir() / "notice.json").read_text())["action"] == "leave"
    assert not (pod.run_dir() / "loss.json").exists()


def test_the_lease_counts_from_the_end_of_the_wait_for_a_reply(pod: Pod) -> None:
    """Otherwise an outage right after a reply that waited 20 s would cost the ranks up to 40 s of their lease."""
    pod.desk.disconnect_s, pod.desk.waited_s = 4.0, 500.0
    pod.order(OBEY)
    pod.wait_until_running()
    lease_s = float((pod.folder / "run" / "lease").read_text())
    assert 400.0 < lease_s - time.clock_gettime(time.CLOCK_BOOTTIME) < 505.0


@pytest.mark.parametrize(("failed", "code"), [(True, 1), (False, 0)])
def test_agent_of_an_ended_job_exits(pod: Pod, failed: bool, code: int) -> None:
    pod.order(STUBBORN)
    pod.wait_until_running()
    pod.desk.kill = "its job is gone"
    pod.desk.ending = {"done": True, "failed": failed}
    pod.desk.document = None
    pod.end(code)
    assert pod.codes() == [-9, -9]


def test_start_failure_is_reported(pod: Pod) -> None:
    pod.order(OBEY, command=())
    pod.wait(lambda: pod.codes() == [127, 127])
    assert "command is empty" in pod.last()["failure"]
    pod.order(OBEY, generation=2, ranks=1, command=("/no/such/program",))
    pod.wait(lambda: pod.codes(2) == [127])
    assert "/no/such/program" in pod.last(2)["failure"]
    pod.order("import sys; sys.exit('out of slots')", generation=3, ranks=1)
    pod.wait(lambda: pod.codes(3) == [1])
    assert pod.last(3)["ranks"][0]["tail"] == "out of slots"
    pod.order(OBEY, generation=4, ranks=1, command=("/" + 2 * TEXT_LENGTH_MAX * "x",))
    pod.wait(lambda: pod.codes(4) == [127])
    assert len(pod.last(4)["failure"]) <= TEXT_LENGTH_MAX, "or the API takes none of its reports"


def test_ranks_have_the_variables_and_the_directory_of_the_container_without_the_agents(pod: Pod) -> None:
    pod.process.terminate()
    pod.process.wait()
    pod.start(WANDB_API_KEY="w", EBBTIDE_CHECKPOINT_DIR=str(pod.folder / "checkpoints"), RANK="9")
    pod.order("import json, os; json.dump([os.getcwd(), dict(os.environ)], open('facts', 'w'))", ranks=1)
    pod.wait(lambda: pod.codes() == [0])
    directory, facts = json.loads((pod.folder / "facts").read_text())
    run_dir = pod.run_dir()
    assert directory == str(pod.folder)
    assert (facts["RANK"], facts["PATH"], facts["WANDB_API_KEY"]) == ("0", PATH, "w")
    assert (facts["EBBTIDE_RUN_DIR"], facts["EBBTIDE_PLAN"]) == (str(run_dir), str(run_dir / "plan.json"))
    assert facts["EBBTIDE_CHECKPOINT_DIR"] == str(pod.folder / "checkpoints")
    assert "CUDA_VISIBLE_DEVICES" not in facts, "the container has the GPUs of the job only"
    assert not {"EBBTIDE_TOKEN_FILE", "EBBTIDE_POD"} & facts.keys()
    assert not any("eba_secret" in value for value in facts.values())


def test_one_process_per_node_gets_the_place_where_ranks_meet(pod: Pod) -> None:
    words = ("{nnodes}", "{nproc_per_node}", "{master_addr}", "{master_port}")
    code = "import json, sys; json.dump(sys.argv[1:], open('words', 'w'))"
    pod.order("", launch=LaunchMode.NODE, command=("python", "-c", code, *words))
    pod.wait(lambda: pod.codes() == [0, 0])
    nodes, ranks, host, port = json.loads((pod.folder / "words").read_text())
    assert (nodes, ranks, host) == ("1", "2", "127.0.0.1")
    assert int(port) > 1024


def test_archive_of_the_job_is_fetched_with_the_token_of_its_agents(pod: Pod) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("train.py")
        entry.size = len(code := b"print('from the archive')")
        archive.addfile(entry, io.BytesIO(code))
    pod.desk.archive = buffer.getvalue()
    digest = f"sha256:{sha256(pod.desk.archive).hexdigest()}"
    pod.order("", ranks=1, archive=digest, setup=("sh", "-c", "echo made > made"), command=("python", "train.py"))
    pod.wait(lambda: pod.codes() == [0])
    assert (f"/base/v1/archives/{digest}?job=a%2Fb", "Bearer eba_secret") in pod.desk.requests
    pod.wait(lambda: "rank 0 | from the archive" in pod.log())


def test_sigterm_keeps_the_deadline_of_a_later_notice(pod: Pod) -> None:
    pod.order(STUBBORN, ranks=1)
    pod.wait_until_running(1)
    pod.process.send_signal(signal.SIGTERM)
    pod.wait(lambda: (pod.run_dir() / "notice.json").exists())
    pod.desk.notice = {"action": "replan", "step": None, "seconds_left": 0.0}
    pod.end(0)
    assert "deadline" in pod.last()["killed"]


def test_restarted_container_does_not_restart_the_generation(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait_until_running()
    kill_tree(pod.process)
    pod.wait(lambda: not find_run_processes(pod.folder / "run"))
    pod.desk.reports.clear()
    pod.start()
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.last()["killed"] == "the supervisor was killed"


def test_rotated_token_is_read_for_the_next_connection(pod: Pod) -> None:
    pod.wait(lambda: bool(pod.desk.reports))
    (pod.folder / "token").write_text("eba_rotated\n")
    pod.desk.is_reachable = False
    pod.wait(lambda: ("/base/v1/jobs/a%2Fb/agents/n0", "Bearer eba_rotated") in pod.desk.requests)


def test_reply_of_an_older_leader_and_malformed_ones_are_ignored(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait_until_running()
    pod.desk.malformed = {"poll_after_s": 0.1, "done": "perhaps"}
    pod.wait(lambda: "malformed reply" in pod.log())
    pod.desk.malformed, pod.desk.epoch, pod.desk.kill = None, 0, "an older leader says so"
    pod.wait(lambda: "leader epoch 0" in pod.log())
    assert pod.codes() == [None, None]


def test_invalid_variable_is_named() -> None:
    ran = subprocess.run([sys.executable, "-P", "-m", "scheduler.agent.pod"], env=_bare(), capture_output=True)
    assert ran.returncode == 2
    assert b"EBBTIDE_JOB_ID" in ran.stderr


def _bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}


def test_checkpoint_request_is_passed_on_once(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait_until_running()
    notice = pod.run_dir() / "notice.json"
    seen = set[float]()
    for request in ("1.5", "1.5", "2.5"):
        heard = len(pod.desk.reports)
        pod.desk.notice = {"action": "checkpoint", "step": 7, "seconds_left": None, "request": request}
        pod.wait(partial(_is_told, notice, pod.desk.reports, heard + 3))
        seen.add(notice.stat().st_mtime_ns)
        assert json.loads(notice.read_text()) == {"action": "checkpoint", "step": 7, "seconds_left": None}
    assert len(seen) == 2, "written anew for another request only"
    assert pod.codes() == [None, None], "nobody is asked to leave"


def _is_told(notice: Path, reports: Sequence[object], count: int) -> bool:
    return notice.exists() and len(reports) >= count
