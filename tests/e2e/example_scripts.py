"""The example training scripts with small settings, and the losses that they print."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from scheduler.domain.checkpoints import DEFAULT_CHECKPOINT, CheckpointSpec
from scheduler.domain.run_document import LaunchMode
from tests.e2e.framework_trainings import FRAMEWORKS

EXAMPLES = Path(__file__).parents[2] / "examples" / "training"
PACED = Path(__file__).with_name("paced_script.py")
_NANOGPT_LINE = re.compile(r"step (\d+): train loss ([\d.]+), val loss ([\d.]+)")
_UNMODIFIED_LINE = re.compile(r"step \d+: loss ([\d.]+)")
_MINGPT_LINE = re.compile(r"\[RANK(\d+)\] epoch (\d+) \| batch \d+ \| loss ([\d.]+)")
_TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes", "{nnodes}", "--node-rank", "{node_rank}"),
    *("--nproc-per-node", "{nproc_per_node}", "--master-addr", "{master_addr}", "--master-port", "{master_port}"),
)


_ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--machine_rank", "0"),
    *("--num_processes", "{nproc_per_node}", "--main_process_ip", "{master_addr}"),
    *("--main_process_port", "{master_port}", "--mixed_precision", "no", "--dynamo_backend", "no"),
)
"""`accelerate launch` on one machine. With `--multi_gpu` it starts several processes, also where there is no GPU."""


@dataclass(frozen=True)
class Example:
    """An example script.

    Attributes:
        launcher: what starts the script once per node, None for the default of `launch`.
        venv: environment of the job, None for that of the tests.
        options: arguments for `steps` steps.
        read_losses: the losses that all ranks of a generation have printed, in the order of steps.
    """

    name: str
    script: Path
    launch: LaunchMode
    options: Callable[[Path, int], Sequence[str]]
    read_losses: Callable[[Iterable[str]], list[float]]
    checkpoint: CheckpointSpec = DEFAULT_CHECKPOINT
    launcher: Sequence[str] | None = None
    venv: Path | None = None

    def command(self, data: Path, steps: int, *, pause_s: float) -> tuple[str, ...]:
        default = _TORCHRUN if self.launch is LaunchMode.NODE else ()
        launcher = default if self.launcher is None else self.launcher
        python = sys.executable if self.venv is None else "python"
        paced = (str(PACED), str(pause_s), str(self.script))
        return (python, *launcher, *paced, *self.options(data, steps))

    def run_alone(self, data: Path, steps: int, folder: Path) -> list[float]:
        """Return the losses of one process without interruption and without Ebbtide."""
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "1") if self.launch is LaunchMode.NODE else ()
        options = [word.replace("{checkpoint_dir}", str(folder)) for word in self.options(data, steps)]
        command = [sys.executable, *launcher, str(self.script), *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return self.read_losses(done.stdout.splitlines())


def _nanogpt_options(data: Path, steps: int) -> Sequence[str]:
    return (
        *(f"--data_dir={data}", "--out_dir={checkpoint_dir}/out", f"--max_iters={steps}", f"--lr_decay_iters={steps}"),
        *("--eval_interval=1", "--eval_iters=2", "--log_interval=1", "--gradient_accumulation_steps=4"),
        *("--batch_size=2", "--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16"),
        *("--learning_rate=3e-2", "--warmup_iters=2"),
    )


def _read_nanogpt_losses(lines: Iterable[str]) -> list[float]:
    return [float(match[2]) for line in lines if (match := _NANOGPT_LINE.match(line))]


def _mingpt_options(data: Path, steps: int) -> Sequence[str]:
    # The text has 3 blocks of 16 bytes less than STEPS_PER_EPOCH batches of 8.
    return ("--text", str(data / "input.txt"), "--epochs", str(steps // STEPS_PER_EPOCH), "--block-size", "16")


def _read_mingpt_losses(lines: Iterable[str]) -> list[float]:
    """Return the mean over the ranks, whose shares of a batch are equal, of the steps that all ranks have printed.

    Ranks under torchrun share one unbuffered output, which can have two texts on a line and then two line ends.
    """
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    for line in lines:
        for match in _MINGPT_LINE.finditer(line):
            by_rank[int(match[1])].append(float(match[3]))
    return [mean(losses) for losses in zip(*by_rank.values(), strict=False)]


def _unmodified_options(_data: Path, steps: int) -> Sequence[str]:
    return ("--out", "{checkpoint_dir}", "--steps", str(steps))


def _read_unmodified_losses(lines: Iterable[str]) -> list[float]:
    return [float(match[1]) for line in lines if (match := _UNMODIFIED_LINE.search(line))]


STEPS_PER_EPOCH = 6
NANOGPT = Example("nanogpt", EXAMPLES / "nanogpt" / "train.py", LaunchMode.RANK, _nanogpt_options, _read_nanogpt_losses)
MINGPT = Example(
    "mingpt-ddp", EXAMPLES / "mingpt-ddp" / "train.py", LaunchMode.NODE, _mingpt_options, _read_mingpt_losses
)
UNMODIFIED = Example(
    "unmodified",
    EXAMPLES / "unmodified" / "train.py",
    LaunchMode.NODE,
    _unmodified_options,
    _read_unmodified_losses,
    CheckpointSpec(path="ckpt.pt", signal="SIGTERM"),
)


ACCELERATED = replace(UNMODIFIED, name="unmodified under accelerate", launcher=_ACCELERATE, venv=FRAMEWORKS)


def prepare_data(folder: Path) -> Path:
    """Write the data of all examples, and return the folder."""
    data = folder / "data"
    subprocess.run([sys.executable, str(EXAMPLES / "nanogpt" / "prepare.py"), str(data)], check=True)
    text = (data / "val.bin").read_bytes()[::2].decode()
    (data / "input.txt").write_text(text[: (STEPS_PER_EPOCH * 8 - 3) * 16 + 1])
    return data
