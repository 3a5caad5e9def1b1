"""`python -m scheduler.worker.pod_agent`: the agent of one job on one node, where no controller starts processes.

It asks the control plane over HTTP what to do (POST /v1/jobs/{job}/agents/{node}), runs the job's ranks on its node,
generation after generation, and reports them. See pod_environment for its variables.

    pod_agent        HTTP, notices, reports: threads and sockets, no torch
      agent          scheduler.worker.agent, as local executors start it: one thread, torch loaded, forks ranks
        rank ...

Nobody of them outlives the one above it. What they print appears in the pod agent's own output, marked. SIGTERM asks
the ranks to leave; what is left shortly before the grace is over is killed, so that there is time to say so. Exit code
0; 1 where the job has failed; 2 for a wrong environment.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import select
import signal
import sys
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler.executors.local_agent import NodeAgent
from scheduler.executors.local_records import RunRoot
from scheduler.executors.render import agent_environment
from scheduler.worker.agent_line import AgentLine, Reply
from scheduler.worker.node_run import NodeRun
from scheduler.worker.notice import notice_from_json
from scheduler.worker.pod_environment import PodEnvironment, pod_environment
from scheduler.worker.rank_logs import RankLogs

logger = logging.getLogger("scheduler.worker.pod_agent")

_AGENT = (sys.executable, "-m", "scheduler.worker.agent", "--die-with-parent")
_PRELOAD = ("scheduler.worker.warm",)
_LOOK_PERIOD_S = 0.1
_LAST_WORD_S = 2.0
_HEARD_WITHIN_S = 5.0
_READ_WITHIN_S = 1.0
_DONE_GRACE_S = 5.0
_INNER_END_S = 5.0


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s pod-agent %(levelname)s %(message)s")
    try:
        environment = pod_environment(os.environ)
        environment.run_root.mkdir(parents=True, exist_ok=True)
        environment.read_token()
    except (OSError, ValueError) as wrong:
        logger.error("%s", wrong)
        return 2
    return PodAgent(environment, preload=arguments.preload or _PRELOAD).serve()


class PodAgent:
    """Mutable on purpose: it stands for processes."""

    def __init__(self, environment: PodEnvironment, *, preload: Sequence[str]) -> None:
        self._environment = environment
        self._preload = [word for module in preload for word in ("--preload", module)]
        self._root = RunRoot(environment.run_root)
        self._wake_fd, woken_fd = os.pipe()
        for descriptor in (self._wake_fd, woken_fd):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(woken_fd, warn_on_full_buffer=False)
        self._is_told_to_end = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_end)
        self._logs = RankLogs(sys.stdout.buffer, agent_log=self._agent_log)
        self._inner = self._start_inner(0)
        self._run: NodeRun | None = None
        self._exit_code: int | None = None
        self._told: object = ""
        job, node = (urllib.parse.quote(name, safe="") for name in (environment.job_id, environment.node))
        path = f"/v1/jobs/{job}/agents/{node}"
        self._line = AgentLine(environment.url, path, read_token=environment.read_token, wake_fd=woken_fd)

    def serve(self) -> int:
        """Until it is told to end, or the job has ended; the exit code. Nothing of its ranks is left then."""
        while self._exit_code is None or (self._run is not None and not self._run.is_over):
            self._wait()
            self._inner.look()
            if self._run is not None:
                self._look_at(self._run)
            if self._is_told_to_end and self._exit_code is None:
                self._leave(within_s=self._environment.grace_s - _LAST_WORD_S, code=0)
            if reply := self._line.take():
                self._follow(reply)
            self._report()
        if self._run is not None and not self._line.close(within_s=_HEARD_WITHIN_S):
            logger.warning("nobody has heard how generation %d ended", self._run.generation)
        self._inner.kill()
        self._inner.close(within_s=_INNER_END_S)
        self._logs.close(within_s=_READ_WITHIN_S)
        return self._exit_code

    @property
    def _agent_log(self) -> Path:
        return self._root.path / "agent.log"

    def _wait(self) -> None:
        """Until the agent reports something, a reply or a signal has come, or it is time to look at what ranks say."""
        fds = [self._wake_fd] if self._inner.is_silent else [self._wake_fd, self._inner.reports_fd]
        if self._wake_fd in select.select(fds, [], [], _LOOK_PERIOD_S)[0]:
            os.read(self._wake_fd, 4096)

    def _report(self) -> None:
        """From when its ranks can be started warm on: whatever begins then, begins at once."""
        if self._inner.is_loading:
            return
        standing = None if self._run is None else self._run.standing
        urgent = standing != self._told
        self._told = standing
        self._line.tell(self._statement(), urgent=urgent)

    def _statement(self) -> dict[str, Any]:
        base: dict[str, Any] = {"pod": self._environment.pod, "generation": 0}
        return base if self._run is None else base | self._run.report()

    def _follow(self, reply: Reply) -> None:
        """Do what the control plane says. A malformed reply is logged, and the ranks go on."""
        try:
            if reply.document["done"]:
                self._exit_code = 1 if reply.document["failed"] else 0
                if self._run is not None:
                    self._leave(within_s=_DONE_GRACE_S, code=self._exit_code)
            elif self._run is not None and not self._run.is_over:
                self._steer(self._run, reply)
            elif self._exit_code is None and reply.report == self._statement():
                # How the last generation ended was heard. Its report gives way to the next one's.
                self._start(reply)
        except (KeyError, TypeError, ValueError, OSError):
            logger.exception("the reply is not understood")

    def _steer(self, run: NodeRun, reply: Reply) -> None:
        document = reply.document
        if reply.report["generation"] == run.generation:
            if document["kill"]:
                logger.warning("generation %d: %s", run.generation, document["kill"])
                run.kill()
            elif document["notice"] is not None:
                notice = notice_from_json(document["notice"])
                if not notice.leaves:
                    run.ask_to_save(notice.step or 0, request=document["notice"]["request"])
                    return
                left_s = math.inf if notice.seconds_left is None else notice.seconds_left
                if self._exit_code is None:
                    run.ask(notice.action, leave_by_s=time.monotonic() + left_s)
                else:  # a pod may be deleted with less grace than it was made with
                    self._leave(within_s=left_s - _LAST_WORD_S, code=self._exit_code)
        if document["begun"] and document["generation"] > run.generation and self._exit_code is None:
            run.ask("replan", leave_by_s=run.leave_by_s)

    def _start(self, reply: Reply) -> None:
        generation = 0 if self._run is None else self._run.generation
        document = reply.document
        if document["begun"] and document["ranks"] and document["generation"] > generation:
            if self._inner.is_silent:
                self._inner.close(within_s=_INNER_END_S)
                self._inner = self._start_inner(document["generation"])
            self._run = NodeRun.start(document, self._inner, self._root, self._environment)
            self._logs.follow(self._run.log_paths)

    def _leave(self, *, within_s: float, code: int) -> None:
        """Have the ranks leave, and end when they have. A deadline that they know of already never moves out."""
        self._exit_code = code
        if self._run is not None:
            leave_by_s = min(time.monotonic() + max(0.0, within_s), self._run.leave_by_s)
            try:
                self._run.ask("leave", leave_by_s=leave_by_s)
            except OSError:
                logger.exception("no notice can be written, so that ranks are told to leave by SIGTERM")
                self._run.terminate()

    def _look_at(self, run: NodeRun) -> None:
        was_over = run.is_over
        run.look(self._inner)
        if run.is_over and not was_over:
            self._logs.follow({})
        if time.monotonic() >= run.leave_by_s:
            run.kill("it was killed at its deadline")

    def _start_inner(self, generation: int) -> NodeAgent:
        return NodeAgent.start(
            [*_AGENT, *self._preload],
            agent_environment({}, run_root=str(self._root.path), inherited=os.environ),
            node=self._environment.node,
            generation=generation,
            started_at_s=time.time(),
            log=self._agent_log,
        )

    def _told_to_end(self, _number: int, _frame: object) -> None:
        self._is_told_to_end = True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.worker.pod_agent", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--preload", action="append", metavar="MODULE", help="imported before any rank (default: what a trainer needs)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
