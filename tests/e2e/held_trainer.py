"""The reference trainer, held where a test wants it: `python -m tests.e2e.held_trainer HOLD OPTION...`

No step is made beyond the number that the file HOLD holds, while it is there and nobody has been told to leave: what a
test does meanwhile needs no guess of how long a training lasts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

from scheduler.trainer import train
from scheduler.trainer.trainer import Trainer

_LOOK_PERIOD_S = 0.02


def hold_at(hold: Path, step: int) -> None:
    """From now on."""
    part = hold.with_suffix(".part")
    part.write_text(str(step))
    part.replace(hold)


def main(hold: Path) -> int:
    notice, one_step = Path(os.environ["EBBTIDE_RUN_DIR"]) / "notice.json", Trainer.train_step

    def held_step(trainer: Trainer) -> None:
        while trainer.position.step >= _allowed(hold) and not notice.exists():
            time.sleep(_LOOK_PERIOD_S)
        one_step(trainer)

    with patch.object(Trainer, "one_step", held_step):
        return train.main()


def _allowed(hold: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return int(hold.read_text())
    return float("inf")


if __name__ == "__main__":
    status = main(Path(sys.argv.pop(1)))
    # As the trainer itself ends.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
