"""The reference trainer, paused where a test wants it:

`python paused_trainer.py HOLD OPTION...`

While the file HOLD exists and there is no notice, no step beyond the number in it runs. Tests can act meanwhile
without guessing how long a training takes.
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

PAUSED_TRAINER = str(Path(__file__))
_POLL_PERIOD_S = 0.02


def hold_at(hold: Path, step: int) -> None:
    """Pause at `step` from now on."""
    part = hold.with_suffix(".part")
    part.write_text(str(step))
    part.replace(hold)


def main(hold: Path) -> int:
    notice, train_step = Path(os.environ["EBBTIDE_RUN_DIR"]) / "notice.json", Trainer.train_step

    def held_step(trainer: Trainer) -> None:
        while trainer.position.step >= _allowed(hold) and not notice.exists():
            time.sleep(_POLL_PERIOD_S)
        train_step(trainer)

    with patch.object(Trainer, "train_step", held_step):
        return train.main()


def _allowed(hold: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return int(hold.read_text())
    return float("inf")


if __name__ == "__main__":
    status = main(Path(sys.argv.pop(1)))
    # Exit as the trainer itself does.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)
