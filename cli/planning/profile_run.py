"""A run of `ebbtide profile`: measure, derive the profile, validate it, and write the files."""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.exit_codes import CommandError
from cli.inputs import input_errors_from, load_hardware
from cli.output import make_console
from scheduler.domain.machine import GpuDevice, MachineInventory
from scheduler.profiling.measurement_log import DeviceFacts, MeasurementLog, MeasurementLogError, merge_rounds
from scheduler.profiling.rank_processes import RankOptions, RanksFailedError, measure_all
from scheduler.profiling.task_lists import (
    SCALES,
    Scale,
    list_collective_tasks,
    list_kernel_tasks,
    list_probe_tasks,
    list_validation_tasks,
    spread_out,
)

if TYPE_CHECKING:
    from scheduler.profiling.profile_derivation import DerivedProfile
    from scheduler.profiling.tasks import GptShape, Task
    from scheduler.profiling.validation import ComparedStep, Validation
    from scheduler.solver.profiles.hardware_profile import HardwareProfile

_MEASURING_SHARE = 0.5
"""Share of the time limit for the profile if a validation follows."""

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of a run of `ebbtide profile`.

    Attributes:
        device: kind of the devices: `cpu`, `cuda`, `rocm` or `npu`.
        ranks: devices, each with one process.
        base: profile, by name or file, with what cannot be measured here; empty means that of the product, or of the
            most similar one.
        name: of the GPU in the profile; empty means that of the base.
        rounds: times that everything but the validation is measured, in turn.
        plans: plans of the validation, at most; 0 means no validation.
        time_limit_s: after which no further task begins; infinite without one.
        scale: name of the sizes of measurements; empty means what suits the device.
    """

    device: str
    ranks: int
    base: str
    name: str
    rounds: int
    plans: int
    time_limit_s: float
    scale: str


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The profile of a device, and its validation if there was one.

    Attributes:
        failed: tasks without a measurement, with the reason.
        skipped: number of tasks for which no time was left; `infeasible` plans were not run.
    """

    device: DeviceFacts
    derived: DerivedProfile
    base: str
    figures: Mapping[Task, Mapping[str, float]]
    scale: Scale
    validation: Validation | None
    failed: tuple[tuple[str, str], ...]
    skipped: int
    infeasible: int


def detect_device_kind() -> str:
    """Return the kind of accelerator whose driver this machine has, or `cpu`."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
        if count:
            return "cuda"
    tools = {"rocm-smi": "rocm", "npu-smi": "npu"}
    return next((kind for tool, kind in tools.items() if shutil.which(tool)), "cpu")


def run_profile(options: ProfileOptions, log_file: Path) -> ProfileResult:
    """Measure, derive and validate.

    Raises:
        InputError: the base is unknown, or `log_file` belongs to another device.
        CommandError: the ranks cannot start, or too little was measured.
    """
    deadline_s = time.monotonic() + options.time_limit_s
    with input_errors_from("--measurements"):
        log = MeasurementLog(log_file)
    scale = SCALES[options.scale or ("processor" if options.device == "cpu" else "accelerator")]
    kernels: list[Task] = list_kernel_tasks(scale, has_host_link=options.device != "cpu")
    # Steps say more than single collectives if time runs out.
    tasks = [*kernels, *list_probe_tasks(scale, options.ranks), *list_collective_tasks(scale, options.ranks)]
    rounds = [(task, number) for number in range(options.rounds) for task in tasks]
    share = _MEASURING_SHARE if options.plans else 1.0
    skipped = _measure("measuring", options, log, rounds, deadline_s - (1 - share) * options.time_limit_s)
    assert log.device is not None, "the ranks have said which device they have"
    derived, base = _derive(options, log, log.device)
    validation, infeasible = None, 0
    if options.plans:
        validation, infeasible, left = _validate(options, log, derived, scale, deadline_s)
        skipped += left
    failed = tuple((_describe_task(each.task), each.failure) for each in log.measurements if each.failure)
    figures = merge_rounds(log.measurements)
    return ProfileResult(log.device, derived, base, figures, scale, validation, failed, skipped, infeasible)


def _measure(
    title: str, options: ProfileOptions, log: MeasurementLog, tasks: Sequence[tuple[Task, int]], deadline_s: float
) -> int:
    """Measure what is not in the log, until the deadline, and return the number of tasks that are left."""
    pending = len(log.list_pending(tasks))
    if not pending:
        return 0
    left = pending
    with _progress_bar(title, pending) as report:
        try:
            for measurement, left in measure_all(RankOptions(options.ranks, options.device), log, tasks):
                report(_describe_task(measurement.task), pending - left)
                if time.monotonic() > deadline_s:
                    break
        except MeasurementLogError as error:
            raise CommandError(f"--measurements: {error}") from error
        except RanksFailedError as error:
            raise CommandError(f"the measuring processes cannot start: {error}") from error
    return left


@contextmanager
def _progress_bar(title: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar if stderr is a terminal. Yields the function that updates it: (what was measured, done)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    screen = make_console(stderr=True)
    with Progress(*parts, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda what, done: bar.update(task, completed=done, description=what)


def _derive(options: ProfileOptions, log: MeasurementLog, device: DeviceFacts) -> tuple[DerivedProfile, str]:
    from scheduler.profiling.profile_derivation import derive_profile

    base = load_hardware("--base", options.base) if options.base else _find_base(device)
    try:
        derived = derive_profile(device, merge_rounds(log.measurements), base, options.name or base.gpu)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return derived, base.gpu


def _find_base(device: DeviceFacts) -> HardwareProfile:
    """Return the profile of the product, or one estimated from the most similar product."""
    from scheduler.solver.profiles.catalog import load_gpu, parse_gpu
    from scheduler.solver.profiles.estimated_gpu import estimate_profile, find_profile

    if device.kind == "cpu":
        return load_gpu("cpu")
    reported = GpuDevice(0, device.name, "", device.memory_bytes)
    known = find_profile(reported)
    return load_gpu(known) if known else parse_gpu(estimate_profile(MachineInventory(gpus=(reported,))))


def _validate(
    options: ProfileOptions, log: MeasurementLog, derived: DerivedProfile, scale: Scale, deadline_s: float
) -> tuple[Validation, int, int]:
    from scheduler.profiling.validation import compare_steps, select_feasible

    assert log.device is not None, "the device was measured"
    feasible, infeasible = select_feasible(list_validation_tasks(scale, options.ranks), derived.hardware, log.device)
    tasks = [(task, 0) for task in spread_out(feasible, options.plans)]
    left = _measure("validating", options, log, tasks, deadline_s)
    try:
        return compare_steps(merge_rounds(log.measurements), derived.hardware, log.device), infeasible, left
    except ValueError as error:
        raise CommandError(str(error)) from error


def _describe_task(task: Task) -> str:
    from scheduler.profiling.tasks import StepTask

    if isinstance(task, StepTask):
        shape = task.shape
        return f"{task.purpose} {shape.layers}x{shape.hidden} seq {shape.sequence} {task.plan.summarize()}"
    return f"{task.kind} {' '.join(str(value) for value in asdict(task).values())}"


def write_profile(result: ProfileResult, file: Path) -> None:
    """Write the profile document, each figure with its source."""
    from scheduler.solver.calibration.hardware_constants import format_gpu_document

    derived = result.derived
    text = format_gpu_document(
        derived.hardware, source=f"as in the profile {result.base}; not measured", sources=derived.sources
    )
    document = json.loads(text)
    if "collectives" in document and "collectives" in derived.sources:
        document["collectives"]["source"] = derived.sources["collectives"]
    write_text("--out", file, json.dumps(document, indent=2) + "\n")


def write_galvatron(result: ProfileResult, folder: Path) -> None:
    """Write Galvatron's files and the `spec.json` with which `ebbtide plan --galvatron` reads them."""
    from scheduler.profiling.galvatron_files import build_galvatron_files

    with input_errors_from("--galvatron"):
        files = build_galvatron_files(
            result.device, result.figures, result.derived.hardware, _get_galvatron_model(result.scale)
        )
    for name, content in files.items():
        write_text("--galvatron", folder / name, json.dumps(content, indent=4) + "\n")


def _get_galvatron_model(scale: Scale) -> GptShape:
    return replace(scale.model, sequence=scale.sequences[0])


def format_validation_csv(validation: Validation) -> str:
    """Return one row per step, with predicted and measured figures."""
    text = io.StringIO()
    rows = [flatten_step(step) for step in validation.steps]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    )
    return text.getvalue()


def flatten_step(step: ComparedStep) -> dict[str, Any]:
    """Return a compared step as one flat row."""
    plan, shape = step.task.plan, step.task.shape
    strategy = plan.stages[0].strategies[0]
    return {
        **asdict(shape),
        "tensor": strategy.tp,
        "data": strategy.dp,
        "pipeline": plan.pipeline_devices,
        "zero": strategy.zero,
        "sequence_sharding": strategy.sequence_sharding,
        "recompute": strategy.recompute.value,
        "micro_batch": plan.micro_batch_size // strategy.dp,
        "micro_batches": plan.micro_batches,
        "global_batch": plan.global_batch,
        "measured_s": step.measured_s,
        "predicted_s": step.predicted_s,
        "time_error": step.time_error,
        "spread": step.spread,
        "measured_bytes": step.measured_bytes,
        "predicted_bytes": step.predicted_bytes,
        "memory_error": step.memory_error,
        **{f"predicted_{name}": value for name, value in asdict(step.terms).items()},
        "measured_forward_s": step.measured_forward_s,
        "measured_optimizer_s": step.measured_optimizer_s,
    }


def write_text(option: str, file: Path, text: str) -> None:
    """Write a file, and make its folder.

    Raises:
        CommandError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option}: {file} cannot be written: {error.strerror or error}") from error
