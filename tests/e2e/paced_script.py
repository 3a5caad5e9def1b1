"""Run a training script unchanged, with a pause after each step: `paced_script.py SECONDS SCRIPT [ARGUMENT ...]`."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    pause_s, script = float(sys.argv[1]), sys.argv[2]
    register_optimizer_step_post_hook(lambda *_: time.sleep(pause_s))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


main()
