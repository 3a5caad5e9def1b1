"""Times of single kernels: matrix products, attention, memory, launches, the host link and the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from scheduler.profiling.ranks.device import Device
from scheduler.profiling.tasks import (
    AttentionTask,
    BandwidthTask,
    GemmTask,
    HostLinkTask,
    LaunchTask,
    OptimizerTask,
)
from scheduler.trainer.model import Block, GptSize
from scheduler.trainer.sharded_optimizers import ShardedAdamW

_FLOAT_BYTES = 4


def measure_gemm(task: GemmTask, device: Device) -> dict[str, float]:
    """Return the time of the forward product, and of the two products of the backward pass together."""
    rows, weight, gradient = (
        torch.randn(shape, device=device.torch_name, dtype=device.compute_dtype)
        for shape in ((task.m, task.k), (task.n, task.k), (task.m, task.n))
    )
    forward = device.time_calls(lambda: functional.linear(rows, weight))
    backward = device.time_calls(lambda: (gradient @ weight, gradient.t() @ rows))
    return _join_passes(forward, backward)


@torch.no_grad()
def _attend(parts: list[Tensor]) -> Tensor:
    query, key, value = parts
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def measure_attention(task: AttentionTask, device: Device) -> dict[str, float]:
    """Return the times of forward and backward pass, the latter as what it adds to the former."""
    shape = (task.samples, task.heads, task.tokens, task.width)
    parts = [
        torch.randn(shape, device=device.torch_name, dtype=device.compute_dtype, requires_grad=True) for _ in range(3)
    ]
    gradient = torch.randn(shape, device=device.torch_name, dtype=device.compute_dtype)

    def run_both() -> None:
        query, key, value = parts
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(attended, parts, gradient)

    forward, both = device.time_calls(lambda: _attend(parts)), device.time_calls(run_both)
    backward_s = max(both["time_s"] - forward["time_s"], 0.0)
    return _join_passes(forward, {"time_s": backward_s, "spread": both["spread"]})


def measure_bandwidth(task: BandwidthTask, device: Device) -> dict[str, float]:
    """Return the bytes per second of a sum: two arrays are read, one is written."""
    count = task.size_bytes // _FLOAT_BYTES
    one, two, total = (torch.ones(count, device=device.torch_name) for _ in range(3))
    timed = device.time_calls(lambda: torch.add(one, two, out=total))
    return {"bytes_per_s": 3 * count * _FLOAT_BYTES / timed["time_s"], **timed}


def measure_launch(task: LaunchTask, device: Device) -> dict[str, float]:
    """Return the times of the passes of a block of the reference model over two tokens, under autocast on a device."""
    block = Block(GptSize(1, task.hidden, 1, vocabulary=8, sequence=2)).to(device.torch_name)
    values = torch.randn(1, 2, task.hidden, device=device.torch_name, requires_grad=True)
    uses_autocast = device.compute_dtype is not torch.float32
    dtype = device.compute_dtype if uses_autocast else torch.bfloat16

    def run_forward() -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=uses_autocast):
            outputs: Tensor = block(values)
        return outputs

    forward = device.time_calls(run_forward)
    both = device.time_calls(lambda: run_forward().sum().backward())  # type: ignore[no-untyped-call]  # untyped in torch
    backward_s = max(both["time_s"] - forward["time_s"], 0.0)
    return _join_passes(forward, {"time_s": backward_s, "spread": both["spread"]})


def measure_host_link(task: HostLinkTask, device: Device) -> dict[str, float]:
    """Return the bandwidth of copies to the host and back, and the time of Adam on the host per parameter."""
    count = task.size_bytes // _FLOAT_BYTES
    on_host = torch.ones(count, pin_memory=True)
    on_device = torch.ones(count, device=device.torch_name)
    down = device.time_calls(lambda: on_host.copy_(on_device, non_blocking=True))
    up = device.time_calls(lambda: on_device.copy_(on_host, non_blocking=True))
    seconds = (down["time_s"] + up["time_s"]) / 2
    adam = _time_adam(count, "cpu", device)
    return {
        "bytes_per_s": count * _FLOAT_BYTES / seconds,
        "optimizer_s_per_parameter": adam["time_s"] / count,
        "spread": max(down["spread"], up["spread"], adam["spread"]),
    }


def measure_optimizer(task: OptimizerTask, device: Device) -> dict[str, float]:
    """Return the time of an AdamW step."""
    return _time_adam(task.parameters, device.torch_name, device)


def _time_adam(count: int, place: str, device: Device) -> dict[str, float]:
    """Time the step of the reference trainer's optimizer over one parameter."""
    weight = torch.nn.Parameter(torch.zeros(count, device=place))
    weight.grad = torch.zeros_like(weight)
    optimizer = ShardedAdamW([weight], lr=1e-4, weight_decay=0.01)
    return device.time_calls(optimizer.step, batches=3)


def _join_passes(forward: dict[str, float], backward: dict[str, float]) -> dict[str, float]:
    return {
        "forward_s": forward["time_s"],
        "backward_s": backward["time_s"],
        "spread": max(forward["spread"], backward["spread"]),
    }
