"""Measurements in the files of Galvatron (github.com/PKU-DAIR/Hetu-Galvatron), with the `spec.json` of our reader.

Times are in ms, memory in MB (2^20 bytes), bandwidths in GB/s. A layer's times and its activations are measured. What
other degrees keep, and the states of embedding and head, follow from the profile of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.profiling.layer_figures import LayerFigures, compute_activation_bytes, compute_layer_figures
from scheduler.profiling.measurement_log import DeviceFacts
from scheduler.profiling.reference_model import build_reference_profile
from scheduler.profiling.tasks import CollectiveTask, GptShape, Task
from scheduler.solver.profiles.hardware_profile import HardwareProfile, Precision
from scheduler.solver.profiles.model_profile import REFERENCE_VALUE_BYTES

_MEBI = 1 << 20
_WEIGHT_BYTES = 4
_STATE_BYTES = 16
"""Weight, gradient and AdamW's moments, as Galvatron counts them."""

Figures = Mapping[Task, Mapping[str, float]]


def build_galvatron_files(
    device: DeviceFacts, figures: Figures, hardware: HardwareProfile, model: GptShape
) -> dict[str, Mapping[str, Any]]:
    """Return the content of each file by its name, for `model` with the layer that was measured.

    Raises:
        ValueError: no layer of the model's width and sequence was measured.
    """
    layers = [each for each in compute_layer_figures(figures) if _has_layer_of(each.shape, model)]
    if not layers:
        raise ValueError(
            f"no layer of hidden size {model.hidden} and sequence {model.sequence} was measured. "
            "Allow more time, so that the probe steps are complete."
        )
    name = f"gpt-{model.layers}x{model.hidden}"
    time_file = f"computation_profiling_{hardware.precision.value}_{name}_all.json"
    memory_file = f"memory_profiling_{hardware.precision.value}_{name}_all.json"
    shape = f"1nodes_{device.ranks}gpus_per_node.json"
    spec = {
        "name": name, "time_mode": "batch", "memory_mode": "static",
        "hidden": model.hidden, "layers": model.layers, "seq": model.sequence,
        "time_file": time_file, "memory_file": memory_file, "async_grad_reduce": False,
        "nodes": 1, "gpus_per_node": device.ranks, "memory_gb": device.memory_bytes / 2**30,
        "global_batch": 8 * device.ranks,
    }  # fmt: skip
    return {
        "spec.json": spec,
        time_file: _build_times(layers),
        memory_file: _build_memory(model, _find_activation_bytes(figures, model, hardware.precision), device.ranks),
        f"allreduce_bandwidth_{shape}": _build_bandwidths(figures),
        f"p2p_bandwidth_{shape}": _build_send_bandwidths(figures, device.ranks),
        f"sp_time_{shape}": _build_latencies(figures),
        "overlap_coefficient.json": {"overlap_coe": hardware.overlap_coefficient},
    }


def _has_layer_of(shape: GptShape, model: GptShape) -> bool:
    return (shape.hidden, shape.sequence) == (model.hidden, model.sequence)


def _build_times(layers: list[LayerFigures]) -> Mapping[str, float]:
    """Return forward times per sample of a layer, and of embedding and head, in ms."""
    times = {}
    for each in layers:
        if each.tensor == 1:
            place = f"bsz{each.micro_batch}_seq{each.shape.sequence}"
            times[f"layertype_0_{place}"] = 1e3 * each.forward_s / each.micro_batch
            times[f"layertype_other_{place}"] = 1e3 * each.other_forward_s / each.micro_batch
    return times


def _find_activation_bytes(figures: Figures, model: GptShape, precision: Precision) -> float:
    """Return what a layer keeps of one sample: measured, or by the profile of the model."""
    measured = [each for shape, each in compute_activation_bytes(figures).items() if _has_layer_of(shape, model)]
    if measured and measured[0] > 0:
        return measured[0]
    layer = build_reference_profile(model, precision).layers[0]
    kept = layer.activation_bytes_per_sample + layer.replicated_activation_bytes_per_sample
    return kept * precision.value_bytes / REFERENCE_VALUE_BYTES


def _build_memory(model: GptShape, activation_bytes: float, ranks: int) -> Mapping[str, Any]:
    profile = build_reference_profile(model, Precision.BF16)
    layer, length = profile.layers[0], str(model.sequence)
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= max(ranks, 1)]
    by_degree = {str(degree): activation_bytes / degree / _MEBI for degree in degrees}
    boundary = layer.boundary_bytes_per_sample / _MEBI
    table: dict[str, Any] = {
        "layertype_0_sp": {
            length: {
                "parameter_size": layer.parameters * _WEIGHT_BYTES / _MEBI,
                "tp_activation_per_bsz_dict": {**by_degree, "checkpoint": boundary},
            }
        }
    }
    embedding, head = profile.embedding, profile.head
    ends = {"off": (embedding, head), "on_first": (embedding,), "on_last": (head,)}
    for place, parts in ends.items():
        states = sum(part.parameters for part in parts) * _STATE_BYTES / _MEBI
        activation = (sum(part.activation_bytes_per_sample for part in parts) or boundary) / _MEBI
        table[f"other_memory_pp_{place}_sp"] = {
            length: {
                "model_states": {str(degree): states / degree for degree in degrees},
                "activation": {str(degree): activation / degree for degree in degrees},
            }
        }
    return table


def _list_collectives(figures: Figures, collective: str) -> list[tuple[CollectiveTask, float]]:
    return [
        (task, values["alone_s"])
        for task, values in figures.items()
        if isinstance(task, CollectiveTask) and task.collective == collective
    ]


def _build_bandwidths(figures: Figures) -> Mapping[str, float]:
    """Return the bus bandwidth of the largest all-reduce of each group size. Strided groups count as neighbours."""
    largest: dict[int, tuple[CollectiveTask, float]] = {}
    for task, time_s in _list_collectives(figures, "all_reduce"):
        if task.ranks not in largest or task.size_bytes > largest[task.ranks][0].size_bytes:
            largest[task.ranks] = task, time_s
    bandwidths = {}
    for ranks, (task, time_s) in sorted(largest.items(), reverse=True):
        moved = 2 * (ranks - 1) / ranks * task.size_bytes
        bandwidths[f"allreduce_size_{ranks}_consec_1"] = moved / time_s / 1e9
        if ranks < max(largest):
            bandwidths[f"allreduce_size_{ranks}_consec_0"] = moved / time_s / 1e9
    return bandwidths


def _build_send_bandwidths(figures: Figures, ranks: int) -> Mapping[str, float]:
    """Return the bandwidth of a message between neighbours, for each number of stages."""
    sends = _list_collectives(figures, "send")
    if not sends:
        return {}
    task, time_s = max(sends, key=lambda each: each[0].size_bytes)
    stages = [count for count in range(2, ranks + 1) if ranks % count == 0]
    return {f"pp_size_{count}": task.size_bytes / time_s / 1e9 for count in stages}


def _build_latencies(figures: Figures) -> Mapping[str, float]:
    """Return times in ms by group size and message, of messages of whole MB."""
    latencies = {}
    for name, collective in (("allreduce", "all_reduce"), ("all2all", "all_to_all")):
        for task, time_s in _list_collectives(figures, collective):
            if task.size_bytes % _MEBI == 0:
                latencies[f"{name}_size_{task.ranks}_{task.size_bytes // _MEBI}MB_time"] = 1e3 * time_s
    return latencies
