"""Run a training script unchanged, with deterministic algorithms: `seeded_script.py PAUSE_S SCRIPT [ARGUMENT ...]`.

Each step of the optimizer is followed by a pause, so that a test can interrupt a script that has no notices.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    pause_s, script = float(sys.argv[1]), sys.argv[2]
    # Operations without a deterministic kernel only warn: the example is run as it is.
    torch.use_deterministic_algorithms(True, warn_only=True)
    if pause_s:
        register_optimizer_step_post_hook(lambda *_: time.sleep(pause_s))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


main()
