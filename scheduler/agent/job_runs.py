"""The runs of one job on one node of the machine: the one that started last, and a newer one that is prepared."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from scheduler.agent.hang_watch import DUMP_TIME_S, HangWatch
from scheduler.agent.preparation import Preparation
from scheduler.agent.rank_environment import list_processes
from scheduler.agent.script_checkpoints import END_TIMEOUT_S, ScriptCheckpoints
from scheduler.agent.supervised_run import RunState, SupervisedRun
from scheduler.domain.codec import encode
from scheduler.domain.run_document import LaunchMode, MasterAddress, RunDocument

logger = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 10.0
_TEXT_LENGTH_MAX = 4000  # the API rejects reports with much longer texts
_START_FAILED_CODE = 127
_KILLED_CODE = -9


class ActiveRun:
    """A generation whose ranks may have started, and what the control plane wants of it."""

    def __init__(self, run: SupervisedRun) -> None:
        self.run = run
        self.state: RunState = run.poll()
        self._kill_reason = ""
        self._is_kill_ordered = self._is_terminated = False
        self._leave_by_s = math.inf
        self._action = self._checkpoint_request = ""
        self._began_at_s = time.monotonic()
        self._hang_watch = HangWatch.create(run)
        self._aborted_at_s: float | None = None
        self._script_checkpoints = ScriptCheckpoints.create(run)

    @property
    def generation(self) -> int:
        return self.run.document.generation

    @property
    def has_ended(self) -> bool:
        return self.state.has_ended

    @property
    def is_leaving(self) -> bool:
        return bool(self._action) or self.has_ended

    def update(self) -> None:
        """Read what ranks and supervisor have written, and enforce the deadline to leave."""
        self.state = self.run.poll()
        self._watch_script_checkpoints()
        if self.has_ended:
            return
        self._watch_for_hang()
        if time.monotonic() >= self._leave_by_s:
            self.kill(self._describe_deadline())
        is_silent = not self.state.statuses and time.monotonic() >= self._began_at_s + _STATUS_TIMEOUT_S
        if self._action and is_silent and not self._is_terminated and self._script_checkpoints is None:
            self._terminate()

    def _terminate(self) -> None:
        self._is_terminated = True
        self.run.terminate()

    def _watch_script_checkpoints(self) -> None:
        """Let a script without a session save, and end it once it has. Its session, if it has one, comes first."""
        watch = self._script_checkpoints
        is_killed = bool(self._kill_reason) or self._is_kill_ordered
        if watch is None or self.state.statuses or is_killed:
            return  # a file that a killed rank was writing is not complete
        if self._action:
            watch.ask()
        codes = [self.state.exit_codes.get(seat.rank) for seat in list_processes(self.run.document)]
        watch.look(codes if None not in codes else None)
        if watch.is_saved and not self.has_ended and not self._is_terminated:
            self._leave_by_s = min(self._leave_by_s, time.monotonic() + END_TIMEOUT_S)
            self._terminate()

    def _describe_deadline(self) -> str:
        reason, watch = "the deadline to leave has passed", self._script_checkpoints
        return reason if watch is None or watch.is_saved else f"{reason}: {watch.describe_missing()}"

    def apply_order(self, notice: Mapping[str, Any] | None, kill: str) -> None:
        """Pass a notice on to the ranks, or kill them."""
        if self.has_ended:
            return
        if kill:
            self._obey_kill(kill)
        elif notice is not None and notice["action"] == "checkpoint":
            self._request_checkpoint(notice)
        elif notice is not None:
            self._request_exit(notice)

    def leave(self, within_s: float) -> None:
        """Ask the ranks to save and exit. A deadline that they already have is never extended.

        They get SIGTERM if the notice cannot be written, for example because the disk is full.
        """
        if self.has_ended:
            return
        try:
            self._request_exit({"action": "leave", "seconds_left": within_s})
        except OSError:
            logger.exception("%s: cannot write the notice, sending SIGTERM instead", self.run)
            self._terminate()

    def save_before_lease_ends(self, within_s: float) -> None:
        """Ask the ranks to save and exit within this time, after which their supervisor ends them."""
        if self.has_ended or self._action:
            return
        try:
            self._action = "leave"
            self.run.write_notice("leave", seconds_left=within_s)
        except OSError:
            logger.exception("%s: cannot write the notice, so its ranks end without a save", self.run)

    def kill(self, reason: str, *, is_own_decision: bool = True) -> None:
        logger.warning("%s: killing its ranks: %s", self.run, reason)
        if is_own_decision:
            self._kill_reason = self._kill_reason or reason
        self._is_kill_ordered |= not is_own_decision
        self.run.kill()

    def _watch_for_hang(self) -> None:
        """Observe whether the ranks make progress, unless they leave. Kill aborted ranks that are still there."""
        if self._aborted_at_s is not None and time.monotonic() >= self._aborted_at_s + DUMP_TIME_S:
            self.run.kill()
        elif self._hang_watch is not None and not self.is_leaving:
            self._hang_watch.look(self.state.statuses)

    def _obey_kill(self, reason: str) -> None:
        """Kill the ranks as the control plane orders. Hung ranks without known stacks abort first, to write them."""
        if self._aborted_at_s is not None:
            return
        if self._hang_watch is not None and self._hang_watch.abort():
            self._aborted_at_s = time.monotonic()
        else:
            self.kill(reason, is_own_decision=False)

    def report(self) -> dict[str, Any]:
        watch = self._script_checkpoints
        saved = {} if watch is None else {"checkpoint_age_s": watch.age_s, "saved": watch.is_saved}
        fault = {} if self.state.permanent_fault is None else {"permanent_fault": self.state.permanent_fault.value}
        memory = {} if self.state.exceeded_memory is None else {"exceeded_memory": self.state.exceeded_memory}
        return {
            **saved,
            **fault,
            **memory,
            "generation": self.generation,
            "ranks": [self._report_rank(seat.rank) for seat in self.run.document.ranks],
            "failure": self.state.failure[:_TEXT_LENGTH_MAX],
            "killed": (self._kill_reason or ("" if self._is_kill_ordered else self.state.loss))[:_TEXT_LENGTH_MAX],
            "machine_fault": bool(self.state.loss) and not (self._kill_reason or self._is_kill_ordered),
            "terminated": self._is_terminated or (watch is not None and watch.is_signalled),
        }

    def _report_rank(self, rank: int) -> dict[str, Any]:
        document = self.run.document
        process = rank if document.launch is LaunchMode.RANK else document.ranks[0].rank
        status = self.state.statuses.get(rank)
        code = self.state.exit_codes.get(process)
        if code is None and self.has_ended:
            code = _START_FAILED_CODE if self.state.failure else _KILLED_CODE
        liveness = {} if self._hang_watch is None else self._hang_watch.describe(rank)
        return {
            "rank": rank,
            "exit_code": code,
            "status": None if status is None else encode(status),
            "written_at_ns": 0 if status is None else status.written_at_ns,
            "tail": self.state.tails.get(process, "")[-_TEXT_LENGTH_MAX:],
            "oom_kills": self.state.oom_kills,
            **liveness,
        }

    def _request_checkpoint(self, notice: Mapping[str, Any]) -> None:
        if not self._action and notice["request"] != self._checkpoint_request:
            self._checkpoint_request = notice["request"]
            self.run.write_notice("checkpoint", step=notice["step"] or 0)

    def _request_exit(self, notice: Mapping[str, Any]) -> None:
        left_s = math.inf if notice["seconds_left"] is None else notice["seconds_left"]
        leave_by_s = time.monotonic() + left_s
        if notice["action"] != self._action or leave_by_s < self._leave_by_s - 1.0:
            self._action, self._leave_by_s = notice["action"], min(leave_by_s, self._leave_by_s)
            self.run.write_notice(notice["action"], seconds_left=left_s)


class JobRuns:
    """The runs of one job on one node."""

    def __init__(self, job_id: str, node: str) -> None:
        self.job_id = job_id
        self.node = node
        self.active: ActiveRun | None = None
        self.prepared: SupervisedRun | None = None
        self._prepared_state: RunState | None = None
        self._preparing: Preparation | None = None
        self._is_leaving = False

    @property
    def is_empty(self) -> bool:
        return self.active is None and self.prepared is None and self._preparing is None

    @property
    def has_ranks(self) -> bool:
        """Whether a rank is alive, or a run is still being prepared."""
        return self._preparing is not None or (self.active is not None and not self.active.has_ended)

    @property
    def generations(self) -> tuple[int, int]:
        """The generations that are started and prepared, as the report names them; 0 for none."""
        report = self.report()
        return report["generation"], report.get("prepared", 0)

    @property
    def is_changing(self) -> bool:
        """Whether a run is about to start or to end."""
        return (
            self.prepared is not None
            or self._preparing is not None
            or (self.active is not None and self.active.is_leaving)
        )

    def update(self) -> None:
        """Take up a finished preparation, and read what the ranks have written."""
        if self._preparing is not None and self._preparing.done():
            preparing, self._preparing = self._preparing, None
            self.prepared = preparing.result()
            if self._is_leaving:
                self._discard_unless(0)
        if self.prepared is not None:
            self._prepared_state = self.prepared.poll()
        if self.active is not None:
            self.active.update()

    def leave(self, within_s: float) -> None:
        """Ask the ranks to save and exit within this time. From now on, no run is prepared or begun."""
        self._is_leaving = True
        self._discard_unless(0)
        if self.active is not None:
            self.active.leave(within_s)

    def give_up_preparation(self) -> None:
        """End the setup command of a run that is being prepared."""
        if self._preparing is not None:
            self._preparing.cancel()

    def apply_order(self, order: Mapping[str, Any], prepare: Callable[[RunDocument], Preparation]) -> None:
        """Do what the control plane asks. `order` is one entry of the reply to a machine's report."""
        wanted: int = order["generation"]
        self._discard_unless(wanted)
        if self.active is not None:
            self.active.apply_order(order["notice"], order["kill"])
            if self.active.has_ended and order["is_recorded"]:
                self.active.run.settle()
                self.active = None
        if self._is_leaving:
            return
        if order["document"] is not None and self.prepared is None and self._preparing is None:
            self._preparing = prepare(RunDocument.from_document(order["document"]))
        if order["begin"] is not None and self.prepared is not None and self._may_begin:
            run, self.prepared, self._prepared_state = self.prepared, None, None
            self.active = ActiveRun(_begin(run, MasterAddress(order["begin"]["host"], order["begin"]["port"])))

    def report(self) -> dict[str, Any]:
        """Return the entry of this job and node in the machine's report."""
        none: dict[str, Any] = {"generation": 0, "ranks": []}
        report = none if self.active is None else self.active.report()
        report |= {"job_id": self.job_id, "node": self.node}
        state = self._prepared_state
        if self._preparing is not None and self._preparing.setting_up:
            report |= {"setting_up": self._preparing.setting_up}
        if self.prepared is not None and state is not None and (state.is_prepared or state.has_ended):
            report |= {"prepared": self.prepared.document.generation, "master_port": state.port}
        return report

    @property
    def _may_begin(self) -> bool:
        return self.active is None or self.active.has_ended

    def _discard_unless(self, generation: int) -> None:
        """Discard a prepared run of another generation. One that is still being prepared is discarded once it is.

        A preparation is given up if no generation is wanted. Another one would need the same working directory.
        """
        if not generation:
            self.give_up_preparation()
        if self.prepared is not None and self.prepared.document.generation != generation:
            self.prepared.kill()
            self.prepared.settle()
            self.prepared = self._prepared_state = None


def _begin(run: SupervisedRun, master: MasterAddress) -> SupervisedRun:
    """Start the ranks of a prepared run. A run that could not be prepared, or cannot start, has ended as failed."""
    if run.poll().has_ended:
        return run
    try:
        run.start(master)
    except (ValueError, OSError) as error:
        logger.exception("cannot start %s", run)
        run.kill()
        return SupervisedRun.record_failure(run.document, run.folder, f"node {run.document.node}: {error}")
    return run
