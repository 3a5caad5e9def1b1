"""The session of a training whose loop belongs to a framework, which calls it at its own step boundaries."""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from ebbtide.notice import Notice
from ebbtide.session import Session

if TYPE_CHECKING:
    import torch

_LOSS_PERIOD_S = 1.0


class FrameworkSession:
    """A session whose end follows from that of the process.

    The script may evaluate or export its model once the framework has trained it. So the job succeeds when the process
    ends after `finish` without an uncaught exception, with exit code 0.

    Attributes:
        session: the session of this rank.
    """

    def __init__(self) -> None:
        self.session = Session.from_environment()
        self._saving = ExitStack()
        self._is_saving = False
        self._is_finished = self._has_failed = False
        self._loss_read_at_s = float("-inf")
        self._previous_hook = sys.excepthook
        sys.excepthook = self._report_exception
        atexit.register(self._close)

    def end_step(self, step: int, *, loss: float | None = None) -> Notice | None:
        """Report a completed step, and return the notice to act on. Collective: every rank must call it."""
        self.session.report(step=step, loss=loss)
        return self.session.poll_notice()

    def read_loss(self, loss: torch.Tensor | None) -> float | None:
        """Return a loss as a number. Reading it waits for its GPU, so in between it is the last one reported."""
        if loss is None:
            return None
        now_s = time.monotonic()
        if loss.is_cuda and now_s - self._loss_read_at_s < _LOSS_PERIOD_S:
            return self.session.status.loss
        self._loss_read_at_s = now_s
        return float(loss.detach().float().mean())

    def begin_saving(self, step: int) -> None:
        """Report that the framework now writes the checkpoint of `step`."""
        self._saving.enter_context(self.session.saving(step))
        self._is_saving = True

    def end_saving(self, step: int) -> None:
        """Report that the checkpoint of `step` is complete on all ranks."""
        if self._is_saving:
            self._saving.close()
        else:
            self.session.mark_saved(step)
        self._is_saving = False

    def leave(self) -> NoReturn:
        """End the process as the notice requires. The state must be saved.

        Raises:
            SystemExit: always.
        """
        self.session.leave()
        destroy_process_group()
        raise SystemExit(0)

    def finish(self) -> None:
        """Report that all steps are done and saved. The rank succeeds when its process ends."""
        self._is_finished = True

    def fail(self, error: BaseException) -> None:
        """Report that the training ended with an error, unless it has ended already."""
        if not self.session.status.phase.is_terminal:
            self.session.__exit__(type(error), error, error.__traceback__)
            self._has_failed = True

    def _report_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self.fail(error)
        self._previous_hook(kind, error, traceback)

    def _close(self) -> None:
        if self._has_failed:
            return
        if self._is_finished and not self.session.status.phase.is_terminal:
            # The interpreter does not tell its exit code, for example that of `sys.exit`.
            self.session.succeed(awaits_exit_code=True)
        self.session.__exit__(None, None, None)


def wait_for_all_ranks() -> None:
    """Wait until every rank has come here, if there are several."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def destroy_process_group() -> None:
    """Destroy the process group of the framework, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
