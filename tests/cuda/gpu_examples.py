"""The example scripts on a GPU, and the losses that they print or record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cuda.gpu_trainings import REPOSITORY, SEEDED, GpuTraining
from tests.e2e.example_scripts import MINGPT, NANOGPT, STEPS_PER_EPOCH, UNMODIFIED
from tests.e2e.example_scripts import Example as PlainExample
from tests.e2e.framework_trainings import mean_losses, read_history

EXAMPLES = REPOSITORY / "examples"
PRECISE, ROUNDED = 1e-4, 1e-3
"""Tolerances of losses: in float32, and where activations have 16 bits."""


@dataclass(frozen=True, slots=True)
class GpuExample:
    """An example script.

    Attributes:
        framework: package that the script needs besides torch.
        options: arguments, given the folder of the data.
        leaves: steps after which generations leave.
    """

    name: str
    script: Path
    steps: int
    leaves: tuple[int, ...]
    options: Callable[[Path], Sequence[str]]
    read_losses: Callable[[GpuTraining], dict[int, float]]
    tolerance: float = PRECISE
    framework: str = "torch"

    def open(self, root: Path, data: Path, *, pause_s: float = 0.0) -> GpuTraining:
        words = [word.replace("{checkpoint_dir}", str(root / "checkpoints")) for word in self.options(data)]
        return GpuTraining(root, [str(SEEDED), str(pause_s), str(self.script), *words])


def _read_printed(training: GpuTraining) -> dict[int, float]:
    return mean_losses(["\n".join(training.read_lines())])


def _read_trainer(training: GpuTraining) -> dict[int, float]:
    return read_history(training.checkpoints / "out")


def _plain(
    example: PlainExample,
    steps: int,
    *options: str,
    name: str = "",
    tolerance: float = PRECISE,
    leaves: tuple[int, ...] = (5, 12),
) -> GpuExample:
    def read_losses(training: GpuTraining) -> dict[int, float]:
        return dict(enumerate(example.read_losses(training.read_lines()), start=1))

    def list_options(data: Path) -> Sequence[str]:
        return [*example.options(data, steps), *options]

    label = name or example.name
    return GpuExample(label, example.script, steps, leaves, list_options, read_losses, tolerance)


def _framework(
    name: str,
    steps: int,
    *options: str,
    label: str = "",
    tolerance: float = PRECISE,
    read_losses: Callable[[GpuTraining], dict[int, float]] = _read_printed,
) -> GpuExample:
    script = EXAMPLES / name / "train.py"
    # An epoch of the examples ends after step 13.
    return GpuExample(label or name, script, steps, (5, 13), lambda _: options, read_losses, tolerance, name)


_TRAINER_OPTIONS = (
    *("--output_dir", "out", "--max_steps", "30", "--per_device_train_batch_size", "8", "--save_strategy", "no"),
    *("--gradient_accumulation_steps", "2", "--learning_rate", "0.02", "--lr_scheduler_type", "constant"),
    *("--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "True"),
)
NANOGPT_BF16 = _plain(NANOGPT, 24, "--out_dir=out", name="nanogpt-bfloat16", tolerance=ROUNDED)
NANOGPT_FP16 = _plain(NANOGPT, 24, "--out_dir=out", "--dtype=float16", name="nanogpt-float16", tolerance=ROUNDED)
NANOGPT_COMPILED = _plain(
    NANOGPT, 24, "--out_dir=out", "--compile=True", name="nanogpt-compiled", tolerance=ROUNDED, leaves=(12,)
)
MINGPT_DDP = _plain(MINGPT, 4 * STEPS_PER_EPOCH)
BY_NOTICE = (
    NANOGPT_BF16,
    NANOGPT_FP16,
    NANOGPT_COMPILED,
    MINGPT_DDP,
    _framework("accelerate", 26, "--epochs", "2"),
    _framework("lightning", 26, "--epochs", "2"),
    _framework("transformers", 30, *_TRAINER_OPTIONS, read_losses=_read_trainer),
    _framework(
        "transformers",
        30,
        *_TRAINER_OPTIONS,
        *("--bf16", "True"),
        label="transformers-bfloat16",
        tolerance=ROUNDED,
        read_losses=_read_trainer,
    ),
)
BY_SIGNAL = _plain(UNMODIFIED, 30)
