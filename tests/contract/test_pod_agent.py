"""The agent of a pod as a process, told what to do by a test that stands where the API stands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from api.routers.agents import TEXT_LENGTH_MAX
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.domain.scaling_curve import data_parallel_plan
from scheduler.executors.local_processes import marked_processes
from tests.http_server import LoopbackServer, Quiet

PATIENCE_S = 60.0
NOTHING: dict[str, Any] = {
    "generation": 0, "begun": False, "ranks": [], "notice": None, "kill": "", "done": False, "failed": False,
    "poll_after_s": 0.1,
}  # fmt: skip
OBEY = """
    import json, os, pathlib, time
    run_dir, rank = pathlib.Path(os.environ["EBBTIDE_RUN_DIR"]), os.environ["RANK"]
    def say(phase, step):
        part = run_dir / f"part-{rank}"
        part.write_text(json.dumps({"phase": phase, "step": step}))
        part.rename(run_dir / f"status-{rank}.json")
    say("running", 1)
    while not (run_dir / "notice.json").exists():
        time.sleep(0.01)
    say("left", 2)
"""
STUBBORN = OBEY.replace('(run_dir / "notice.json").exists()', "False")
SEES_NOTHING_OF_THE_FIRST = """
    import json, os, pathlib
    from scheduler.executors.local_processes import marked_processes
    first = pathlib.Path(os.environ["EBBTIDE_RUN_DIR"]).with_name("gen-1")
    assert not marked_processes(first, variable="EBBTIDE_RUN_DIR")
    assert [json.loads((first / f"status-{rank}.json").read_text())["phase"] for rank in (0, 1)] == ["left", "left"]
"""


class Desk:
    """An HTTP server that keeps the newest report and gives `reply`, or breaks the connection where that is None."""

    def __init__(self) -> None:
        self.reply: dict[str, Any] | None = dict(NOTHING)
        self.reports: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str | None]] = []
        self.connections = 0
        desk = self

        class Handler(Quiet, BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                desk.connections += 1
                super().setup()

            def do_POST(self) -> None:
                report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                desk.requests.append((self.path, self.headers["Authorization"]))
                if desk.reply is None:
                    self.close_connection = True
                    return
                desk.reports.append(report)
                body = json.dumps(desk.reply).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        server = LoopbackServer(Handler)
        self.url, self.close = server.url, server.close

    @property
    def report(self) -> dict[str, Any]:
        return self.reports[-1] if self.reports else {}


class Pod:
    def __init__(self, folder: Path, desk: Desk) -> None:
        self.folder, self.desk = folder, desk
        self.start()

    def start(self) -> None:
        env = {
            **os.environ,
            "EBBTIDE_JOB_ID": "a/b",
            "EBBTIDE_NODE": "n0",
            "EBBTIDE_POD": "p1",
            "EBBTIDE_URL": f"{self.desk.url}/base/",
            "EBBTIDE_TOKEN": "eba_secret",
            "EBBTIDE_RUN_ROOT": str(self.folder / "run"),
            "EBBTIDE_GRACE_S": "5",
        }
        with (self.folder / "agent.log").open("ab") as log:
            command = [sys.executable, "-m", "scheduler.worker.pod_agent", "--preload", "json"]
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def order(self, script: str, *, generation: int = 1, ranks: int = 2, **more: Any) -> None:
        """What the desk tells from now on: start these ranks, which run `script`."""
        path = self.folder / "rank.py"
        path.write_text(dedent(script))
        self.desk.reply = {
            **NOTHING,
            "generation": generation,
            "begun": True,
            "world_size": ranks,
            "command": ["python", str(path)],
            "checkpoint_dir": "",
            "plan": plan_to_json(data_parallel_plan("cpu", ranks)),
            "ranks": [
                {"rank": rank, "local_rank": rank, "gpu": rank, "env": {"RANK": str(rank), "EBBTIDE_RUN_ROOT": ""}}
                for rank in range(ranks)
            ],
            **more,
        }

    def tell(self, **fields: Any) -> None:
        assert self.desk.reply is not None
        self.desk.reply = {**self.desk.reply, **fields}

    def wait(self, reached: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < limit_s, f"{self.desk.report}\n{(self.folder / 'agent.log').read_text()}"
            time.sleep(0.01)

    def codes(self, generation: int = 1) -> list[int | None]:
        report = self.desk.report
        return [rank["exit_code"] for rank in report["ranks"]] if report.get("generation") == generation else []

    def phases(self) -> list[str]:
        return [(rank["status"] or {}).get("phase", "") for rank in self.desk.report.get("ranks", [])]

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def end(self, code: int) -> None:
        assert self.process.wait(PATIENCE_S) == code, self.log()
        assert not marked_processes(self.folder / "run")


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    desk = Desk()
    made = Pod(tmp_path, desk)
    yield made
    made.process.kill()
    made.process.wait()
    desk.close()
    made.wait(lambda: not marked_processes(tmp_path / "run"))


def test_ranks_are_started_reported_and_told_to_leave_and_the_next_ones_follow(pod: Pod) -> None:
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
    assert pod.desk.report["killed"] == "it was killed at its deadline"
    assert pod.desk.connections == 1, "one connection for all of it"


def test_a_newer_generation_waits_until_the_older_one_has_left(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.order(SEES_NOTHING_OF_THE_FIRST, generation=2, ranks=1)
    pod.wait(lambda: pod.codes(2) not in ([], [None]))
    assert pod.codes(2) == [0], pod.desk.report["ranks"][0]["tail"]


def test_a_notice_that_could_not_be_written_is_written_once_it_can_be(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    in_the_way = pod.folder / "run/jobs/a%2Fb/gen-1/.notice.json.part"
    in_the_way.mkdir()
    pod.tell(notice={"action": "leave", "step": None, "seconds_left": None})
    pod.wait(lambda: "IsADirectoryError" in pod.log())
    in_the_way.rmdir()
    pod.wait(lambda: pod.codes() == [0, 0])
    assert pod.phases() == ["left", "left"]


def test_ranks_are_killed_when_the_reply_says_so(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.tell(kill="rank 7 was ended by SIGSEGV")
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.desk.report["killed"] == "", "that was not its own decision"
    assert pod.process.poll() is None


def test_ranks_go_on_while_nobody_answers_and_that_is_logged_once(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.desk.reply, before = None, len(pod.desk.requests)
    pod.wait(lambda: len(pod.desk.requests) > before + 3)
    assert pod.log().count("ranks go on") == 1
    pod.order(OBEY, notice={"action": "leave", "step": None, "seconds_left": None})
    pod.wait(lambda: pod.codes() == [0, 0])
    assert "answers again" in pod.log()


@pytest.mark.parametrize(("failed", "code"), [(True, 1), (False, 0)])
def test_an_agent_whose_job_has_ended_ends_with_what_is_left_of_its_ranks(pod: Pod, failed: bool, code: int) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.desk.reply = {**NOTHING, "done": True, "failed": failed}
    pod.end(code)
    assert pod.phases() == ["left", "left"]


def test_what_cannot_be_started_is_told(pod: Pod) -> None:
    pod.order(OBEY, command=[])
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.desk.report["failure"].startswith("node n0 cannot start its ranks: command: the job has none")
    pod.order(OBEY, generation=2, ranks=1, command=["/no/such/program"])
    pod.wait(lambda: pod.codes(2) == [127])
    assert pod.desk.report["failure"].startswith("rank 0 cannot be started: [Errno 2]")
    pod.order("import sys; sys.exit('out of slots')", generation=3, ranks=1)
    pod.wait(lambda: pod.codes(3) == [1])
    assert pod.desk.report["ranks"][0]["tail"] == "out of slots"
    pod.order(OBEY, generation=4, ranks=1, command=["/" + 2 * TEXT_LENGTH_MAX * "x"])
    pod.wait(lambda: pod.codes(4) == [127])
    assert len(pod.desk.report["failure"]) <= TEXT_LENGTH_MAX, "or the API takes none of its reports"


def test_a_rank_gets_its_variables_and_folders_and_no_token_of_the_agents(pod: Pod) -> None:
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


def test_a_container_that_starts_again_does_not_start_a_generation_again(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.process.kill()
    pod.process.wait()
    pod.wait(lambda: not marked_processes(pod.folder / "run"))
    pod.desk.reports.clear()
    pod.start()
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.desk.report["killed"] == "generation 1 was begun on node n0 once before"


def test_when_the_process_that_forks_is_killed_its_run_is_lost_and_the_next_one_starts(pod: Pod) -> None:
    pod.order(STUBBORN)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    (inner,) = psutil.Process(pod.process.pid).children()
    inner.kill()
    pod.wait(lambda: pod.codes() == [-9, -9])
    assert pod.desk.report["killed"] == "the agent of node n0 was ended by SIGKILL"
    pod.order(OBEY, generation=2, ranks=1)
    pod.wait(lambda: pod.phases() == ["running"])


def test_a_reply_that_makes_no_sense_changes_nothing(pod: Pod) -> None:
    pod.order(OBEY)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.desk.reply = {"poll_after_s": 0.1, "done": "perhaps"}
    pod.wait(lambda: "the reply is not understood" in pod.log())
    assert pod.codes() == [None, None]


def test_a_wrong_variable_is_named(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "scheduler.worker.pod_agent"], env=_bare(), capture_output=True)
    assert ran.returncode == 2
    assert b"EBBTIDE_URL is missing" in ran.stderr


def _bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
