"""`python -m scheduler.trainer.train`: the reference trainer as a command, one process per rank.

Exit status: 0 if it succeeded or left after a notice, 1 if it failed, 2 for an invalid command line.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from ebbtide.session import Session

logger = logging.getLogger("scheduler.trainer.train")


def main() -> int:
    arguments = _parse_arguments()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {os.environ.get('RANK', '0')} %(levelname)s %(message)s"
    )
    try:
        # Open the session before the import of torch, which takes seconds, so that no notice is missed meanwhile.
        with Session.from_environment() as session:
            from scheduler.trainer.settings import build_settings
            from scheduler.trainer.trainer import train

            train(session, build_settings(vars(arguments)))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    except Exception:
        logger.exception("Training failed")
        return 1
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.trainer.train", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-gpt", help="name in the model table")
    parser.add_argument(
        "--steps", type=_parse_count, default=0, help="steps of the whole training (default: EBBTIDE_STEPS)"
    )
    parser.add_argument("--global-batch", type=_parse_count, default=0, help="samples per step (default: the plan's)")
    parser.add_argument(
        "--batch-rule",
        default="keep",
        choices=["keep", "linear", "sqrt"],
        help="how the learning rate follows a changed global batch (default: such a change is refused)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=_parse_count,
        default=0,
        help="steps between checkpoints, beside the job's interval",
    )
    parser.add_argument(
        "--keep", type=_parse_positive_count, default=0, help="complete checkpoints to keep (default: the job's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    _add_computation_arguments(parser)
    _add_data_arguments(parser)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=_parse_count, default=0, help="steps over which the learning rate rises")
    parser.add_argument(
        "--decay", default="constant", choices=["constant", "cosine"], help="how the learning rate falls"
    )
    parser.add_argument(
        "--freeze",
        type=_parse_freeze_schedule,
        default=(),
        metavar="STEP:BLOCKS,...",
        help="from these steps on, so many blocks at the front no longer learn",
    )
    parser.add_argument(
        "--frozen-cache",
        type=Path,
        metavar="DIR",
        help="directory, shared by all ranks, that keeps the outputs of frozen blocks for later passes over the text",
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="file with one sample length in tokens in each line, repeated; each batch forms groups that suit its own",
    )
    parser.add_argument("--step-delay-s", type=float, default=0.0, help="pause in each step, as if steps took longer")
    parser.add_argument("--ledger", dest="ledger_dir", type=Path, help="directory for a record of samples and losses")
    parser.add_argument("--ledger-digests", action="store_true", help="put digests of the whole state there too")
    return parser.parse_args()


def _add_computation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"], help="precision of the weights")
    parser.add_argument(
        "--autocast",
        default="none",
        choices=["none", "bf16", "fp16"],
        help="precision of matrix products and attention; fp16 scales the loss (default: that of the weights)",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        choices=["adamw", "sgd", "muon"],
        help="sgd has momentum; muon updates matrices of blocks with Muon and other weights with AdamW",
    )
    parser.add_argument(
        "--clip-norm", type=float, default=0.0, help="largest norm of all gradients together (default: no clipping)"
    )
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="probability of dropping an element of the embedding's output and of each branch of a block",
    )
    parser.add_argument(
        "--compile",
        dest="compile_backend",
        nargs="?",
        const="inductor",
        default="",
        metavar="BACKEND",
        help="run blocks with torch.compile (default backend: inductor)",
    )


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    function = "MODULE:FUNCTION"
    parser.add_argument(
        "--dataset",
        default="",
        metavar=function,
        help="function that returns the training data for `sequence` tokens per sample (default: the bundled text)",
    )
    parser.add_argument("--evaluate-every", type=_parse_count, default=0, help="steps between evaluations")
    parser.add_argument(
        "--evaluation-dataset", default="", metavar=function, help="as --dataset (default: the training data)"
    )
    parser.add_argument(
        "--evaluation-batches", type=_parse_positive_count, default=1, help="global batches of an evaluation"
    )
    parser.add_argument(
        "--evaluation-hook",
        default="",
        metavar=function,
        help="function that rank 0 calls with the step and the loss of each evaluation",
    )


def _parse_count(text: str, minimum: int = 0) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)


def _parse_positive_count(text: str) -> int:
    return _parse_count(text, minimum=1)


def _parse_freeze_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Return ((10, 4), (20, 7)) for `10:4,20:7`."""
    try:
        return tuple((int(step), int(blocks)) for step, blocks in (pair.split(":") for pair in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not STEP:BLOCKS,...: whole numbers such as 10:4,20:7") from None


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    # All results are on disk. Skipping torch's teardown makes the exit faster and avoids aborts of Gloo in it.
    os._exit(status)
