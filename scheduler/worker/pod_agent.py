"""`python -m scheduler.worker.pod_agent`: the agent of one job on one node of a cluster without local processes.

It polls the control plane for its assignment (POST /v1/jobs/{job}/agents/{node}), runs the job's ranks on its node,
one generation after another, and reports them. `environment.read_pod_environment` lists its variables.

    pod agent        HTTP, notices, reports: threads and sockets, no torch
      node agent     scheduler.worker.node_agent, as in the local executor: one thread, torch loaded, forks ranks
        rank ...

Each process dies with its parent. The pod agent forwards the output of all of them to its own standard output, with
a prefix. On SIGTERM it asks the ranks to leave. It kills the remaining ranks shortly before the grace period ends,
so that there is time to report it. Exit status: 0; 1 if the job has failed; 2 if the environment is invalid.
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

from ebbtide.notice import parse_notice
from scheduler.executors.local_agent import NodeAgent
from scheduler.executors.local_records import RunRoot
from scheduler.executors.rank_launch import build_agent_environment
from scheduler.worker.control_plane_client import ControlPlaneClient, Reply
from scheduler.worker.environment import PodEnvironment, read_pod_environment
from scheduler.worker.log_forwarder import LogForwarder
from scheduler.worker.node_run import NodeRun

logger = logging.getLogger("scheduler.worker.pod_agent")

_NODE_AGENT_COMMAND = (sys.executable, "-P", "-m", "scheduler.worker.node_agent", "--die-with-parent")
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
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        return 2
    return PodAgent(environment, preload=arguments.preload or _PRELOAD).serve()


class PodAgent:
    """The agent of one job on one node."""

    def __init__(self, environment: PodEnvironment, *, preload: Sequence[str]) -> None:
        self._environment = environment
        self._preload = [word for module in preload for word in ("--preload", module)]
        self._root = RunRoot(environment.run_root)
        self._wake_read_fd, wake_write_fd = os.pipe()
        for descriptor in (self._wake_read_fd, wake_write_fd):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
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
        self._client = ControlPlaneClient(
            environment.url, path, read_token=environment.read_token, wake_fd=wake_write_fd
        )

    def serve(self) -> int:
        """Run until the agent is stopped or the job has ended, and return the exit status. No rank is left then."""
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
            logger.warning("The end of generation %d could not be reported.", self._run.generation)
        self._node_agent.kill()
        self._node_agent.close(within_s=_NODE_AGENT_STOP_TIMEOUT_S)
        self._logs.close(within_s=_LOG_FLUSH_TIMEOUT_S)
        return self._exit_code

    @property
    def _agent_log(self) -> Path:
        return self._root.path / "agent.log"

    def _wait(self) -> None:
        """Wait for a report of the node agent, a reply, a signal, or the next poll of the rank status files."""
        fds = [self._wake_read_fd]
        if not self._node_agent.has_closed_reports:
            fds.append(self._node_agent.reports_fd)
        if self._wake_read_fd in select.select(fds, [], [], _POLL_PERIOD_S)[0]:
            os.read(self._wake_read_fd, 4096)

    def _send_report(self) -> None:
        """Submit the state of the ranks.

        Reports start once ranks can be forked with torch loaded, so that an assignment starts at once.
        """
        if self._node_agent.is_loading:
            return
        urgent_state = None if self._run is None else self._run.urgent_state
        is_urgent = urgent_state != self._last_urgent_state
        self._last_urgent_state = urgent_state
        self._client.submit(self._build_report(), urgent=is_urgent)

    def _build_report(self) -> dict[str, Any]:
        base: dict[str, Any] = {"pod": self._environment.pod, "generation": 0}
        return base if self._run is None else base | self._run.report()

    def _handle_reply(self, reply: Reply) -> None:
        """Act on the reply. A malformed reply is logged and otherwise ignored, so that the ranks continue."""
        try:
            if reply.document["done"]:
                self._exit_code = 1 if reply.document["failed"] else 0
                if self._run is not None:
                    self._stop(within_s=_DONE_GRACE_S, code=self._exit_code)
            elif self._run is not None and not self._run.has_ended:
                self._control_run(self._run, reply)
            elif self._exit_code is None and reply.report == self._build_report():
                # The control plane knows how the last generation ended, so the next one may start.
                self._start_run(reply)
        except (KeyError, TypeError, ValueError, OSError):
            logger.exception("Ignoring a malformed reply")

    def _control_run(self, run: NodeRun, reply: Reply) -> None:
        document = reply.document
        if reply.report["generation"] == run.generation:
            if document["kill"]:
                logger.warning("Generation %d: %s", run.generation, document["kill"])
                run.kill()
            elif document["notice"] is not None:
                notice = parse_notice(document["notice"])
                if not notice.requires_exit:
                    run.request_checkpoint(notice.step or 0, request_id=document["notice"]["request"])
                    return
                left_s = math.inf if notice.seconds_left is None else notice.seconds_left
                if self._exit_code is None:
                    run.request_exit(notice.action, leave_by_s=time.monotonic() + left_s)
                else:  # a pod may be deleted with a shorter grace period than it was created with
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
        """Ask the ranks to leave, and end when they have. A deadline that the ranks already have is never extended."""
        self._exit_code = code
        if self._run is not None:
            leave_by_s = min(time.monotonic() + max(0.0, within_s), self._run.leave_by_s)
            try:
                self._run.request_exit("leave", leave_by_s=leave_by_s)
            except OSError:
                logger.exception("Cannot write the notice file. Sending SIGTERM to the ranks instead.")
                self._run.terminate()

    def _update_run(self, run: NodeRun) -> None:
        had_ended = run.has_ended
        run.update(self._node_agent)
        if run.has_ended and not had_ended:
            self._logs.follow({})
        if time.monotonic() >= run.leave_by_s:
            run.kill("the deadline to leave has passed")

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
        "--preload",
        action="append",
        metavar="MODULE",
        help="module to import before forking ranks (default: the modules of the reference trainer)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
