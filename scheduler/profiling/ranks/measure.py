"""`python -m scheduler.profiling.ranks.measure`: one rank that measures the tasks which the command sends.

Rank 0 speaks with the command in JSON lines. It writes the facts of its device, reads the tasks from standard input,
and writes one measurement after the other. Anything else that would go to standard output goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ebbtide.status_file import is_out_of_memory
from scheduler.profiling.measurement_log import DeviceFacts
from scheduler.profiling.ranks import kernels
from scheduler.profiling.ranks.collectives import measure_collective
from scheduler.profiling.ranks.device import Device, join_ranks
from scheduler.profiling.ranks.training_steps import measure_step
from scheduler.profiling.tasks import Measurement, Task, measurement_to_json, task_from_json

_MEASURES: dict[str, Callable[[Any, Device], dict[str, float]]] = {
    "gemm": kernels.measure_gemm,
    "attention": kernels.measure_attention,
    "bandwidth": kernels.measure_bandwidth,
    "launch": kernels.measure_launch,
    "host-link": kernels.measure_host_link,
    "optimizer": kernels.measure_optimizer,
    "collective": measure_collective,
    "step": measure_step,
}


def main() -> int:
    arguments = _parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    channel = _take_standard_output()
    device = Device(arguments.device, int(os.environ["LOCAL_RANK"]))
    join_ranks(device, store=arguments.store, rank=rank, world_size=world_size)
    facts = _describe_device(device)
    received: list[Any] = [None]
    if rank == 0:
        _write_line(channel, {"device": asdict(facts)})
        received = [json.loads(sys.stdin.readline())]
    dist.broadcast_object_list(received, src=0)
    for document, number in received[0]:
        measurement = _measure(task_from_json(document), number, device)
        if rank == 0:
            _write_line(channel, measurement_to_json(measurement))
    dist.destroy_process_group()
    return 0


def _measure(task: Task, number: int, device: Device) -> Measurement:
    """Measure one task on all ranks. A lone rank survives a task that fails; others would wait for it."""
    dist.barrier()
    try:
        figures = _MEASURES[task.kind](task, device)
    except (RuntimeError, ValueError) as error:
        if dist.get_world_size() > 1:
            raise
        failure = "out of memory" if is_out_of_memory(error) else str(error).partition("\n")[0]
        figures = {}
    else:
        failure = ""
    device.release_memory()
    return Measurement(task, number, figures, failure)


def _describe_device(device: Device) -> DeviceFacts:
    """Return the facts of this rank's device, after one collective, so that communication has its buffers."""
    dist.all_reduce(torch.ones(1, device=device.torch_name))
    device.synchronize()
    return DeviceFacts(
        kind=device.kind,
        name=device.name,
        memory_bytes=device.memory_bytes,
        precision=device.precision,
        software=device.software,
        ranks=dist.get_world_size(),
        context_bytes=device.measure_context_bytes(),
    )


def _take_standard_output() -> TextIO:
    """Return the stream to the command, and let everything else that is printed go to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _write_line(channel: TextIO, document: dict[str, Any]) -> None:
    channel.write(json.dumps(document) + "\n")
    channel.flush()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.profiling.ranks.measure")
    parser.add_argument("--store", type=Path, required=True, help="file in which the ranks find each other")
    parser.add_argument("--device", required=True, choices=["cpu", "cuda", "rocm", "npu"])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
