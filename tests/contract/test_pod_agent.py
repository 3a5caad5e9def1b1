"""The pod agent as a process, against a fake API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from api.worker_reports import TEXT_LENGTH_MAX
from scheduler.executors.local_run import find_marked_processes
from tests.contract.agent_pod import NOTHING, OBEY, STUBBORN, Pod, agent_pod

SEES_NOTHING_OF_THE_FIRST = """
    import json, os, pathlib
    from scheduler.executors.local_run import find_marked_processes
    first = pathlib.Path(os.environ["EBBTIDE_RUN_DIR"]).with_name("gen-1")
    assert not find_marked_processes(first, variable="EBBTIDE_RUN_DIR")
    assert [json.loads((first / f"status-{rank}.json").read_text())["phase"] for rank in (0, 1)] == ["left", "left"]
"""
HEARS_SIGTERM = """
    import signal
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
""" + OBEY.replace('(run_dir / "notice.json").exists()', "heard")


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with agent_pod(tmp_path) as created:
        yield created


def test_ranks_are_started_reported_and_replaced(pod: Pod) -> None:
    pod.wait(lambda: bool(pod.desk.reports))
    assert pod.desk.report == {"pod": "p1", "generation": 0}
    assert set(pod.desk.requests) == {("/base/v1/jobs/a%2Fb/agents/n0", "Bearer eba_secret")}
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.tell(notice={"action": "replan", "step": None, "seconds_left": 50.0})
    pod.wait(lambda: pod.codes() == [0, 0])
    assert pod.phases() == ["left", "left"]
    pod.order(STUBBORN, generation=2, ranks=1)
    pod.wait(lambda: pod.codes(2) == [None])
    pod.process.send_signal(signal.SIGTERM)
    pod.end(0)
    assert pod.codes(2) == [-9]
    assert "deadline" in pod.desk.report["killed"]
    assert pod.desk.connections == 1, "one connection for all of it"


def test_newer_generation_waits_for_the_older_one(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.order(SEES_NOTHING_OF_THE_FIRST, generation=2, ranks=1)
    pod.wait(lambda: pod.codes(2) not in ([], [None]))
    assert pod.codes(2) == [0], pod.desk.report["ranks"][0]["tail"]
    old = [report for report in pod.desk.reports if report["generation"] == 1][-1]
    assert [rank["exit_code"] for rank in old["ranks"]] == [0, 0], "its end was told before"


def test_failed_notice_write_is_retried(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    in_the_way = pod.folder / "run/jobs/a%2Fb/gen-1/.notice.json.part"
    in_the_way.mkdir()
    pod.tell(notice={"action": "leave", "step": None, "seconds_left": None})
    pod.wait(lambda: "IsADirectoryError" in pod.log())
    in_the_way.rmdir()
    pod.wait(lambda: pod.codes() == [0, 0])
    assert pod.phases() == ["left", "left"]


def test_ranks_get_sigterm_if_the_notice_cannot_be_written(pod: Pod) -> None:
    """For example, a node that evicts pods because its disk is full."""
    pod.order(HEARS_SIGTERM)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    (pod.folder / "run/jobs/a%2Fb/gen-1/.notice.json.part").mkdir()
    pod.process.send_signal(signal.SIGTERM)
    pod.end(0)
    assert (pod.phases(), pod.desk.report["killed"]) == (["left", "left"], "")


def test_kill_order_kills_the_ranks(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.tell(kill="rank 7 was killed by SIGSEGV")
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.desk.report["killed"] == "", "that was not its own decision"
    assert pod.process.poll() is None


def test_ranks_continue_during_an_api_outage_logged_once(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.desk.reply, before = None, len(pod.desk.requests)
    pod.wait(lambda: len(pod.desk.requests) > before + 3)
    assert pod.log().count("Cannot reach the control plane") == 1
    pod.order(OBEY, notice={"action": "leave", "step": None, "seconds_left": None})
    pod.wait(lambda: pod.codes() == [0, 0])
    assert "reachable again" in pod.log()


@pytest.mark.parametrize(("failed", "code"), [(True, 1), (False, 0)])
def test_agent_of_an_ended_job_exits_with_its_ranks(pod: Pod, failed: bool, code: int) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.desk.reply = {**NOTHING, "done": True, "failed": failed}
    pod.end(code)
    assert pod.phases() == ["left", "left"]


def test_start_failure_is_reported(pod: Pod) -> None:
    pod.order(OBEY, command=[])
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.desk.report["failure"].startswith("node n0 cannot start its ranks: ")
    pod.order(OBEY, generation=2, ranks=1, command=["/no/such/program"])
    pod.wait(lambda: pod.codes(2) == [127])
    assert pod.desk.report["failure"].startswith("cannot start rank 0: [Errno 2]")
    pod.order("import sys; sys.exit('out of slots')", generation=3, ranks=1)
    pod.wait(lambda: pod.codes(3) == [1])
    assert pod.desk.report["ranks"][0]["tail"] == "out of slots"
    pod.order(OBEY, generation=4, ranks=1, command=["/" + 2 * TEXT_LENGTH_MAX * "x"])
    pod.wait(lambda: pod.codes(4) == [127])
    assert len(pod.desk.report["failure"]) <= TEXT_LENGTH_MAX, "or the API takes none of its reports"


def test_rank_environment_without_the_agents_token(pod: Pod) -> None:
    pod.order("import json, os, pathlib; pathlib.Path('facts').write_text(json.dumps(dict(os.environ)))", ranks=1)
    pod.tell(command=["python", "-c", f"import os; os.chdir({str(pod.folder)!r}); exec(open('rank.py').read())"])
    pod.wait(lambda: pod.codes() == [0])
    facts = json.loads((pod.folder / "facts").read_text())
    run_dir = pod.folder / "run/jobs/a%2Fb/gen-1"
    assert (facts["RANK"], facts["PATH"]) == ("0", os.environ["PATH"])
    assert (facts["EBBTIDE_RUN_DIR"], facts["EBBTIDE_PLAN"]) == (str(run_dir), str(run_dir / "plan.json"))
    assert (facts["EBBTIDE_RUN_ROOT"], facts["EBBTIDE_CHECKPOINT_DIR"]) == (
        str(pod.folder / "run"),
        str(pod.folder / "run/jobs/a%2Fb/checkpoints"),
    )
    assert not any("eba_secret" in value for value in facts.values())


def test_sigterm_keeps_the_deadline_of_a_later_notice(pod: Pod) -> None:
    pod.order(STUBBORN, ranks=1)
    pod.wait(lambda: pod.phases() == ["running"])
    pod.process.send_signal(signal.SIGTERM)
    pod.wait(lambda: "within 3 s" in pod.log())
    pod.tell(notice={"action": "replan", "step": None, "seconds_left": 0.0})
    pod.end(0)
    assert "deadline" in pod.desk.report["killed"]
    assert "within 0 s" in pod.log()


def test_restarted_container_does_not_restart_the_generation(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.process.kill()
    pod.process.wait()
    pod.wait(lambda: not find_marked_processes(pod.folder / "run"))
    pod.desk.reports.clear()
    pod.start()
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert "generation 1 has already been started" in pod.desk.report["killed"]


def test_killed_fork_server_loses_the_run(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    (inner,) = psutil.Process(pod.process.pid).children()
    inner.kill()
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.desk.report["killed"] == "the agent of node n0 was killed by SIGKILL"
    pod.order(OBEY, generation=2, ranks=1)
    pod.wait(lambda: pod.phases() == ["running"])


def test_invalid_reply_is_ignored(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.desk.reply = {"poll_after_s": 0.1, "done": "perhaps"}
    pod.wait(lambda: "malformed reply" in pod.log())
    assert pod.codes() == [None, None]


def test_invalid_variable_is_named(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "scheduler.worker.pod_agent"], env=_bare(), capture_output=True)
    assert ran.returncode == 2
    assert b"EBBTIDE_URL" in ran.stderr


def _bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}


def test_checkpoint_request_is_sent_once(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    notice = {"action": "checkpoint", "step": 7, "seconds_left": None, "request": "1.5"}
    reported = next(pod.folder.glob("run/jobs/*/gen-1")) / "notice.json"
    seen = set[float]()
    for request in ("1.5", "1.5", "2.5"):
        heard = len(pod.desk.reports)
        pod.desk.reply = {**NOTHING, "generation": 1, "begun": True, "notice": {**notice, "request": request}}
        pod.wait(partial(_is_told, reported, pod.desk.reports, heard + 3))
        seen.add(reported.stat().st_mtime_ns)
        assert json.loads(reported.read_text()) == {"action": "checkpoint", "step": 7, "seconds_left": None}
    assert len(seen) == 2, "written anew for another request only"
    assert pod.codes() == [None, None], "nobody is asked to leave"


def _is_told(notice: Path, reports: Sequence[object], count: int) -> bool:
    return notice.exists() and len(reports) >= count
