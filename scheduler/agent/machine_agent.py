"""The node agent: one daemon per machine, which runs the ranks of many jobs.

    machine agent     polls the control plane; prepares, begins, notifies and kills runs
      supervisor      one per job, node and generation; PID 1 of its container; outlives the agent
        rank ...

Inside a pod it is the same daemon with another identity, which has one job and ends with it (see `pod_daemon`).

A restarted agent finds its runs again in the state folder. Without contact to the control plane, ranks go on until the
lease ends, which every answered report extends; their supervisors enforce it.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any

from scheduler.agent.agent_state import AgentState
from scheduler.agent.control_plane_client import ControlPlaneClient, Reply
from scheduler.agent.control_plane_identity import ControlPlaneIdentity, RankOutput
from scheduler.agent.departure import Departure
from scheduler.agent.job_runs import ActiveRun, JobRuns
from scheduler.agent.preparation import Preparation, Prepare
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_retention import RunRetention
from scheduler.agent.supervised_run import SupervisedRun
from scheduler.domain.run_document import RunDocument

logger = logging.getLogger(__name__)

_BUSY_PERIOD_S, _IDLE_PERIOD_S = 0.05, 0.5
"""Time between two looks at the files of runs."""
_WAIT_S = 20.0
"""Time that a reply may wait until there is something to do."""
_PREPARATIONS_MAX = 64
"""Runs prepared at once. A preparation mostly waits, and setup commands of some jobs must not stop those of others."""
_INTERRUPT_LEAVE_S = 60.0
_FINAL_REPORT_TIMEOUT_S = 5.0
_LEAVING_LENGTH_MAX = 500
_OUTPUT_TIMEOUT_S = 1.0
_DEPARTURE_OUTPUT_TIMEOUT_S = 10.0
"""A machine that leaves for good has no later time to send the output of its ranks."""
_SAVE_S_MAX = 20.0
"""Longest time that ranks without contact to the control plane have to save before their lease ends."""

_RunsKey = tuple[str, str]
"""Job id and node."""


class JobEnd(StrEnum):
    """How the job of a pod's agent has ended."""

    DONE = "done"
    FAILED = "failed"


class MachineAgent:
    """The agent of one machine or pod.

    Args:
        recovered: runs of an earlier agent with this state folder.
        output: takes the output of ranks.
        leave_within_s: time that ranks have to save and exit once the agent gets SIGTERM. None: they go on. After
            SIGINT they always have to exit, and a second SIGINT ends the agent without them.
        departure: says when the machine leaves for good. It does so at every stop of the agent then.
    """

    def __init__(
        self,
        state: AgentState,
        identity: ControlPlaneIdentity,
        prepare: Prepare,
        recovered: list[SupervisedRun],
        retention: RunRetention,
        *,
        output: RankOutput,
        leave_within_s: float | None = None,
        departure: Departure | None = None,
    ) -> None:
        self._state = state
        self._folders = AgentFolders(state.root)
        self._departure = departure
        self._leaving = ""
        self._leave_within_s = leave_within_s
        self._identity = identity
        self._prepare = prepare
        self._jobs: dict[_RunsKey, JobRuns] = {}
        self._errors: dict[_RunsKey, str] = {}
        for run in sorted(recovered, key=lambda run: run.document.generation):
            self._take_up(run)
        self._threads = ThreadPoolExecutor(_PREPARATIONS_MAX, thread_name_prefix="prepare")
        self._wake_read_fd, wake_write_fd = os.pipe()
        for descriptor in (self._wake_read_fd, wake_write_fd):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        self._is_stopping = self._is_interrupted = self._is_abandoning = False
        self._job_end: JobEnd | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request_stop)
        self._reported: object = None
        self._lease_end_s, self._save_s = math.inf, 0.0
        self._client = ControlPlaneClient(
            identity.url,
            identity.report_path,
            read_token=identity.read_token,
            wake_fd=wake_write_fd,
            reply_wait_s=_WAIT_S,
        )
        self._output = output
        self._retention = retention
        self._retention.start(output.has_sent)

    def stop(self) -> None:
        """Have `serve` end as after SIGTERM."""
        self._is_stopping = True

    def serve(self) -> JobEnd | None:
        """Run until SIGTERM or SIGINT, and until the ranks have left if they have to.

        The agent of a pod also runs only until its job has ended. Return how, None after a signal.
        """
        while not self._is_stopping and not self._is_done:
            self._step()
            self._check_departure()
        if self._departure is not None:
            self._leaving = self._leaving or "its agent was asked to stop"
        if self._leave_within_s is not None or self._is_interrupted:
            self._leave(_INTERRUPT_LEAVE_S if self._leave_within_s is None else self._leave_within_s)
        self._retention.close()
        self._send_final_report()
        self._output.close(within_s=_OUTPUT_TIMEOUT_S if self._departure is None else _DEPARTURE_OUTPUT_TIMEOUT_S)
        for runs in self._jobs.values():
            runs.give_up_preparation()  # its thread would keep this process alive
        self._threads.shutdown(wait=False, cancel_futures=True)
        return self._job_end

    @property
    def _is_done(self) -> bool:
        return self._job_end is not None and not self._jobs

    def _step(self) -> None:
        self._save_before_lease_ends()
        self._update()
        self._send_report()
        self._wait()
        if reply := self._client.take_reply():
            self._apply_reply(reply)

    def _check_departure(self) -> None:
        """Begin to leave for good when that is requested."""
        if self._departure is None:
            return
        notice = self._departure.find_notice(has_ranks=any(runs.has_ranks for runs in self._jobs.values()))
        if notice is not None and not self._is_stopping:
            logger.info("leaving for good within %.0f s: %s", notice.within_s, notice.reason)
            self._leaving, self._leave_within_s, self._is_stopping = notice.reason, notice.within_s, True

    def _leave(self, within_s: float) -> None:
        """Ask all ranks to save and exit, and serve until none is left. Nothing is prepared or begun meanwhile."""
        for key, runs in self._jobs.items():
            with self._isolate(key):
                runs.leave(within_s)
        while any(runs.has_ranks for runs in self._jobs.values()) and not self._is_abandoning:
            self._step()

    def _wait(self) -> None:
        """Wait for a reply, a signal, or the next look at the files of runs."""
        is_busy = any(runs.is_changing for runs in self._jobs.values())
        if select.select([self._wake_read_fd], [], [], _BUSY_PERIOD_S if is_busy else _IDLE_PERIOD_S)[0]:
            os.read(self._wake_read_fd, 4096)

    def _update(self) -> None:
        for key, runs in self._jobs.items():
            with self._isolate(key):
                runs.update()
                if (active := runs.active) is not None:
                    self._output.follow(active.run.folder, active.run.document, has_ended=active.has_ended)

    @contextmanager
    def _isolate(self, key: _RunsKey) -> Iterator[None]:
        """Let an error with the runs of one job end neither the agent nor the other jobs. Log it once."""
        try:
            yield
        except Exception as error:
            if self._errors.get(key) != repr(error):
                logger.exception("cannot handle the runs of %s on %s", *key)
            self._errors[key] = repr(error)
        else:
            self._errors.pop(key, None)

    def _send_report(self) -> None:
        """Submit the state of all runs, at once if more than the progress of ranks has changed."""
        report = self._build_report(_WAIT_S)
        essence = [self._leaving, *map(_essence, report["runs"])]
        is_urgent, self._reported = essence != self._reported, essence
        self._client.submit(report, urgent=is_urgent)

    def _send_final_report(self) -> None:
        self._update()
        self._client.submit(self._build_report(0.0), urgent=True)
        if not self._client.close(within_s=_FINAL_REPORT_TIMEOUT_S):
            logger.warning("the last report was not delivered")

    def _build_report(self, wait_s: float) -> dict[str, Any]:
        runs = [runs.report() for _, runs in sorted(self._jobs.items())]
        leaving = {"leaving": self._leaving[:_LEAVING_LENGTH_MAX]} if self._leaving else {}
        return {**self._identity.describe_agent(), "runs": runs, "wait_s": wait_s, **leaving}

    def _apply_reply(self, reply: Reply) -> None:
        """Act on a reply. One of an earlier leader, or a malformed one, changes nothing."""
        document = reply.document
        try:
            if not self._state.accept_epoch(int(document["epoch"])):
                logger.warning("Ignoring a reply of leader epoch %s: a later one was seen", document["epoch"])
                return
            waited_s = float(document.get("waited_s", 0.0))  # a control plane of an earlier version sends none
            self._extend_lease(reply.sent_at_s + waited_s, float(document["disconnect_s"]))
            if document.get("done"):  # in replies to pods only
                self._job_end = JobEnd.FAILED if document["failed"] else JobEnd.DONE
            for order in document["runs"]:
                with self._isolate((str(order["job_id"]), str(order["node"]))):
                    self._apply_order(order, reply)
        except (KeyError, TypeError, ValueError, OSError):
            logger.exception("Ignoring a malformed reply")

    def _extend_lease(self, contact_at_s: float, disconnect_s: float) -> None:
        self._lease_end_s = contact_at_s + disconnect_s
        self._save_s = min(_SAVE_S_MAX, disconnect_s / 4)
        self._state.extend_lease(self._lease_end_s)

    def _save_before_lease_ends(self) -> None:
        """Let ranks save and exit if the control plane is away for too long, before their supervisors kill them."""
        if time.clock_gettime(time.CLOCK_BOOTTIME) >= self._lease_end_s - self._save_s:
            for runs in self._jobs.values():
                if runs.active is not None:
                    runs.active.save_before_lease_ends(self._save_s)

    def _apply_order(self, order: Mapping[str, Any], reply: Reply) -> None:
        key = (str(order["job_id"]), str(order["node"]))
        runs = self._jobs.get(key)
        if runs is None:
            if order["document"] is None or self._is_stopping or self._has_run(key, order["generation"]):
                return
            runs = self._jobs[key] = JobRuns(*key)
        elif _find_report(reply, key) != runs.generations:
            return  # the reply answers an older state of these runs
        runs.apply_order(order, self._start_preparation)
        if runs.is_empty:
            del self._jobs[key]

    def _has_run(self, key: _RunsKey, generation: int) -> bool:
        """Return whether a generation has begun and ended here. The order is older than that end then."""
        job_id, node = key
        folder = self._folders.folder(job_id, generation, node)
        return folder.has_begun and folder.is_settled

    def _start_preparation(self, document: RunDocument) -> Preparation:
        return Preparation(self._threads, self._prepare, replace(document, url=self._identity.url))

    def _take_up(self, run: SupervisedRun) -> None:
        """Take up a run of an earlier agent: an older one of the same job and node has ended."""
        key = (run.document.job_id, run.document.node)
        runs = self._jobs.setdefault(key, JobRuns(*key))
        if run.has_begun:
            runs.active = ActiveRun(run)
        else:
            runs.prepared = run

    def _request_stop(self, number: int, _frame: object) -> None:
        self._is_abandoning = self._is_interrupted and number == signal.SIGINT
        self._is_interrupted |= number == signal.SIGINT
        self._is_stopping = True


def _find_report(reply: Reply, key: tuple[str, str]) -> tuple[int, int]:
    """Return the generations that the answered report gave for a job and node: started and prepared."""
    for report in reply.report["runs"]:
        if (report["job_id"], report["node"]) == key:
            return report["generation"], report.get("prepared", 0)
    return 0, 0


def _essence(report: Mapping[str, Any]) -> object:
    """Return the part of a report whose changes are reported at once."""
    ranks = [
        (
            rank["rank"],
            rank["exit_code"],
            status and (status["phase"], status["checkpoint_step"], status["frozen_layers"]),
            rank.get("liveness"),
        )
        for rank in report["ranks"]
        for status in [rank["status"]]
    ]
    return {**report, "ranks": ranks}
