"""The rendezvous store of a local executor: one child process beside the controller, never inside a rank."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scheduler.executors.log_tail import tail
from scheduler.executors.render import RUN_ROOT_VARIABLE, passed_on

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_PATIENCE_S = 2.0


class Rendezvous:
    """Starts when it is first asked for, and again after it died. It ends by itself when its input closes."""

    def __init__(self, command: Sequence[str], *, run_root: Path) -> None:
        self._command = tuple(command)
        self._run_root = run_root
        self._port_file = run_root / "rendezvous.port"
        self._log = run_root / "rendezvous.log"
        self._process: subprocess.Popen[bytes] | None = None

    def port(self) -> int | None:
        """The port it serves; None while it starts. Never waits."""
        if self._process is not None and self._process.poll() is not None:
            logger.error("the rendezvous store ended: %s", tail(self._log) or "it said nothing")
            self.close()
        if self._process is None:
            self._start()
        try:
            return int(self._port_file.read_text(encoding="ascii"))
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """End the process; waits for it, and kills it when it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.communicate(timeout=_PATIENCE_S)  # closes its input
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        environment = {**passed_on(os.environ), RUN_ROOT_VARIABLE: str(self._run_root)}
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(
                [*self._command, "--port-file", str(self._port_file)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the keyboard is for the controller alone
            )
