"""The runs of a job, as far as no process is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from scheduler.agent.job_runs import ActiveRun
from scheduler.agent.supervised_run import RunState, SupervisedPhase, SupervisedRun


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
