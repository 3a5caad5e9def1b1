"""`python -m scheduler.worker.train`: the reference trainer as a command, one process per rank.

Exit status: 0 when it succeeded or left after a notice, 1 when it failed, 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from scheduler.worker.session import Session

logger = logging.getLogger("scheduler.worker.train")


def main() -> int:
    arguments = _arguments()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {os.environ.get('RANK', '0')} %(levelname)s %(message)s"
    )
    try:
        # The session comes before torch, whose import takes seconds: a notice of that time is not missed.
        with Session.from_environment() as session:
            from scheduler.worker.trainer import TrainerSettings, train

            train(session, TrainerSettings(**vars(arguments)))
    except ValueError as wrong:
        logger.error("%s", wrong)
        return 1
    except Exception:
        logger.exception("training failed")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.worker.train", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-gpt", help="name in the model table")
    parser.add_argument("--steps", type=int, default=0, help="steps of the whole training (default: EBBTIDE_STEPS)")
    parser.add_argument("--global-batch", type=int, default=0, help="samples per step (default: the plan's)")
    parser.add_argument(
        "--checkpoint-every", type=int, default=0, help="steps between checkpoints (default: at the end)"
    )
    parser.add_argument("--keep", type=int, default=2, help="complete checkpoints to keep")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"], help="precision")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--step-delay-s", type=float, default=0.0, help="pause in each step, as if steps took longer")
    parser.add_argument("--ledger", dest="ledger_dir", type=Path, help="directory for a record of samples and losses")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # Everything that counts is on disk. Without torch's teardown the exit is faster, and gloo cannot abort in it.
    os._exit(status)
