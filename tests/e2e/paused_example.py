"""An example script, paused where a test wants it: `paused_example.py HOLD SCRIPT OPTION...`

While the file HOLD exists and there is no notice, no step beyond the number in it runs.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ebbtide import notice as notices
from ebbtide.session import Session

_POLL_PERIOD_S = 0.02
notices._BOUNDARIES_MAX = 1  # ranks leave soon after a pause, so they agree after each step


def main(hold: Path) -> None:
    notice = Path(os.environ["EBBTIDE_RUN_DIR"]) / "notice.json"
    report = Session.report

    def report_and_hold(session: Session, *, step: int, **figures: Any) -> None:
        report(session, step=step, **figures)
        if step < _allowed(hold):
            return
        while step >= _allowed(hold) and not notice.exists():
            time.sleep(_POLL_PERIOD_S)
            session.heartbeat()  # short steps are not written at once
        time.sleep(notices.FILE_PERIOD_S)  # so that the session looks for the notice after this step

    with patch.object(Session, "report", report_and_hold):
        runpy.run_path(sys.argv[0], run_name="__main__")


def _allowed(hold: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return int(hold.read_text())
    return float("inf")


if __name__ == "__main__":
    del sys.argv[0]
    main(Path(sys.argv.pop(0)))
