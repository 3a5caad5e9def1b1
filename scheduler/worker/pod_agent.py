"""`python -m scheduler.worker.pod_agent`: the agent of one job on one node, where no controller starts processes.

It asks the control plane over HTTP what to do (POST /v1/jobs/{job}/agents/{node}), runs the job's ranks on its node,
generation after generation, and reports them. See pod_environment for its variables.

    pod_agent        HTTP, notices, reports: threads and sockets, no torch
      agent          scheduler.worker.node_agent, as local executors start it: one thread, torch loaded, forks ranks
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
from scheduler.executors.rank_launch import build_agent_environment
from scheduler.worker.control_plane_client import ControlPlaneClient, Reply
from scheduler.worker.environment import PodEnvironment, read_pod_environment
from scheduler.worker.log_forwarder import LogForwarder
from scheduler.worker.node_run import NodeRun
from scheduler.worker.notice import parse_notice

logger = logging.getLogger("scheduler.worker.pod_agent")

_NODE_AGENT_COMMAND = (sys.executable, "-m", "scheduler.worker.node_agent", "--die-with-parent")
_PRELOAD = ("scheduler.trainer.preload",)
_POLL_PERIOD_S = 0.1
_FINAL_REPORT_S = 2.0
_FINAL_REPORT_TIMEOUT_S = 5.0
_LOG_FLUSH_TIMEOUT_S = 1.0
_DONE_GRACE_S = 5.0
_NODE_AGENT_STOP_TIMEOUT_S = 5.0


def main() -> int:
    arguments = _parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s pod-agent %(levelname)s %(message)s")
    try:
        environment = read_pod_environment(os.environ)
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
        self._is_stop_requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request_stop)
        self._logs = LogForwarder(sys.stdout.buffer, agent_log=self._agent_log)
        self._node_agent = self._start_node_agent(0)
        self._run: NodeRun | None = None
        self._exit_code: int | None = None
        self._last_urgent_state: object = ""
        job, node = (urllib.parse.quote(name, safe="") for name in (environment.job_id, environment.node))
        path = f"/v1/jobs/{job}/agents/{node}"
        self._client = ControlPlaneClient(environment.url, path, read_token=environment.read_token, wake_fd=woken_fd)

    def serve(self) -> int:
        """Until it is told to end, or the job has ended; the exit code. Nothing of its ranks is left then."""
        while self._exit_code is None or (self._run is not None and not self._run.has_ended):
            self._wait()
            self._node_agent.poll()
            if self._run is not None:
                self._update_run(self._run)
            if self._is_stop_requested and self._exit_code is None:
                self._stop(within_s=self._environment.grace_s - _FINAL_REPORT_S, code=0)
            if reply := self._client.take_reply():
                self._handle_reply(reply)
            self._send_report()
        if self._run is not None and not self._client.close(within_s=_FINAL_REPORT_TIMEOUT_S):
            logger.warning("nobody has heard how generation %d ended", self._run.generation)
        self._node_agent.kill()
        self._node_agent.close(within_s=_NODE_AGENT_STOP_TIMEOUT_S)
        self._logs.close(within_s=_LOG_FLUSH_TIMEOUT_S)
        return self._exit_code

    @property
    def _agent_log(self) -> Path:
        return self._root.path / "agent.log"

    def _wait(self) -> None:
        """Until the agent reports something, a reply or a signal has come, or it is time to look at what ranks say."""
        fds = [self._wake_fd] if self._node_agent.has_closed_reports else [self._wake_fd, self._node_agent.reports_fd]
        if self._wake_fd in select.select(fds, [], [], _POLL_PERIOD_S)[0]:
            os.read(self._wake_fd, 4096)

    def _send_report(self) -> None:
        """From when its ranks can be started warm on: whatever begins then, begins at once."""
        if self._node_agent.is_loading:
            return
        standing = None if self._run is None else self._run.urgent_state
        urgent = standing != self._last_urgent_state
        self._last_urgent_state = standing
        self._client.submit(self._build_report(), urgent=urgent)

    def _build_report(self) -> dict[str, Any]:
        base: dict[str, Any] = {"pod": self._environment.pod, "generation": 0}
        return base if self._run is None else base | self._run.report()

    def _handle_reply(self, reply: Reply) -> None:
        """Do what the control plane says. A malformed reply is logged, and the ranks go on."""
        try:
            if reply.document["done"]:
                self._exit_code = 1 if reply.document["failed"] else 0
                if self._run is not None:
                    self._stop(within_s=_DONE_GRACE_S, code=self._exit_code)
            elif self._run is not None and not self._run.has_ended:
                self._control_run(self._run, reply)
            elif self._exit_code is None and reply.report == self._build_report():
                # How the last generation ended was heard. Its report gives way to the next one's.
                self._start_run(reply)
        except (KeyError, TypeError, ValueError, OSError):
            logger.exception("the reply is not understood")

    def _control_run(self, run: NodeRun, reply: Reply) -> None:
        document = reply.document
        if reply.report["generation"] == run.generation:
            if document["kill"]:
                logger.warning("generation %d: %s", run.generation, document["kill"])
                run.kill()
            elif document["notice"] is not None:
                notice = parse_notice(document["notice"])
                if not notice.requires_exit:
                    run.request_checkpoint(notice.step or 0, request_id=document["notice"]["request"])
                    return
                left_s = math.inf if notice.seconds_left is None else notice.seconds_left
                if self._exit_code is None:
                    run.request_exit(notice.action, leave_by_s=time.monotonic() + left_s)
                else:  # a pod may be deleted with less grace than it was made with
                    self._stop(within_s=left_s - _FINAL_REPORT_S, code=self._exit_code)
        if document["begun"] and document["generation"] > run.generation and self._exit_code is None:
            run.request_exit("replan", leave_by_s=run.leave_by_s)

    def _start_run(self, reply: Reply) -> None:
        generation = 0 if self._run is None else self._run.generation
        document = reply.document
        if document["begun"] and document["ranks"] and document["generation"] > generation:
            if self._node_agent.has_closed_reports:
                self._node_agent.close(within_s=_NODE_AGENT_STOP_TIMEOUT_S)
                self._node_agent = self._start_node_agent(document["generation"])
            self._run = NodeRun.start(document, self._node_agent, self._root, self._environment)
            self._logs.follow(self._run.log_paths)

    def _stop(self, *, within_s: float, code: int) -> None:
        """Have the ranks leave, and end when they have. A deadline that they know of already never moves out."""
        self._exit_code = code
        if self._run is not None:
            leave_by_s = min(time.monotonic() + max(0.0, within_s), self._run.leave_by_s)
            try:
                self._run.request_exit("leave", leave_by_s=leave_by_s)
            except OSError:
                logger.exception("no notice can be written, so that ranks are told to leave by SIGTERM")
                self._run.terminate()

    def _update_run(self, run: NodeRun) -> None:
        was_over = run.has_ended
        run.update(self._node_agent)
        if run.has_ended and not was_over:
            self._logs.follow({})
        if time.monotonic() >= run.leave_by_s:
            run.kill("it was killed at its deadline")

    def _start_node_agent(self, generation: int) -> NodeAgent:
        return NodeAgent.start(
            [*_NODE_AGENT_COMMAND, *self._preload],
            build_agent_environment({}, run_root=str(self._root.path), inherited=os.environ),
            node=self._environment.node,
            generation=generation,
            started_at_s=time.time(),
            log=self._agent_log,
        )

    def _request_stop(self, _number: int, _frame: object) -> None:
        self._is_stop_requested = True


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.worker.pod_agent", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--preload", action="append", metavar="MODULE", help="imported before any rank (default: what a trainer needs)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
