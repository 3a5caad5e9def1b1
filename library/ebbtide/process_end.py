"""The end of a process: after an uncaught exception, or without one."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType


class ProcessEnd:
    """Calls `on_error` for an uncaught exception, and `on_exit` whenever the interpreter ends, until it is closed."""

    def __init__(self, *, on_error: Callable[[BaseException], None], on_exit: Callable[[], None]) -> None:
        self._on_error = on_error
        self._on_exit = on_exit
        self._previous_hook = sys.excepthook
        sys.excepthook = self._handle_exception
        atexit.register(on_exit)

    def close(self) -> None:
        """Let the process end without these calls."""
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._handle_exception:
            sys.excepthook = self._previous_hook

    def _handle_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._on_error(error)
        self._previous_hook(kind, error, traceback)
