"""The runs of a job, as far as no process is needed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from scheduler.agent import preparation
from scheduler.agent.job_runs import ActiveRun, JobRuns
from scheduler.agent.preparation import Preparation
from scheduler.agent.run_folder import RunFolder
from scheduler.agent.supervised_run import RunState, SupervisedPhase, SupervisedRun
from scheduler.domain.run_document import RunDocument
from tests.agent.runs import python_job


def test_ranks_get_sigterm_if_the_notice_cannot_be_written() -> None:
    """For example, on a node that evicts pods because its disk is full."""
    calls = list[str]()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    run = SimpleNamespace(
        poll=lambda: RunState(SupervisedPhase.RUNNING),
        write_notice=refuse,
        terminate=lambda: calls.append("terminate"),
        kill=lambda: calls.append("kill"),
        document=SimpleNamespace(generation=1, ranks=(), hang_timeout_s=None, checkpoint_path="", checkpoint_signal=""),
    )
    active = ActiveRun(cast("SupervisedRun", run))
    active.leave(0.0)
    assert calls == ["terminate"]
    assert active.report()["terminated"]
    active.update()
    assert calls == ["terminate", "kill"], "the deadline holds as well"


def test_long_setup_command_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_SETUP_REPORT_S", 0.0)
    release = threading.Event()

    def prepare(document: RunDocument, _: threading.Event) -> SupervisedRun:
        release.wait()
        return SupervisedRun(RunFolder(Path("/nowhere")), document, None)

    with ThreadPoolExecutor(1) as threads:
        reports = []
        for setup in ((), ("make",)):
            runs, document = JobRuns("job-1", "node-1"), python_job("pass", generation=3, setup=setup)
            order = {"generation": 3, "document": document.to_document(), "notice": None, "kill": "", "begin": None}
            runs.apply_order(order, lambda document: Preparation(threads, prepare, document))
            reports.append(runs.report())
        release.set()
    assert [report.get("setting_up", 0) for report in reports] == [0, 3]
