"""Times and memory of one layer, from steps of models that differ in their number of layers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.profiling.tasks import GptShape, StepTask, Task


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """One layer of a GPT on one device.

    `other_forward_s` is the forward time of embedding, head and loss. Times are for one micro-batch.

    Attributes:
        shape: of the smaller model; its number of layers has no meaning.
        micro_batch: samples of a replica.
        tensor: tensor-parallel degree.
    """

    shape: GptShape
    micro_batch: int
    tensor: int
    forward_s: float
    backward_s: float
    other_forward_s: float


def compute_layer_figures(figures: Mapping[Task, Mapping[str, float]]) -> list[LayerFigures]:
    """Return the figures of each pair of probe models without recompute and pipeline."""
    found: dict[tuple[GptShape, LayerStrategy, int, int], dict[int, Mapping[str, float]]] = {}
    for task, values in figures.items():
        if isinstance(task, StepTask) and task.purpose == "probe" and task.plan.pipeline_devices == 1:
            strategy = replace(task.plan.stages[0].strategies[0], layers=1)
            shape, plan = replace(task.shape, layers=1), task.plan
            key = (shape, strategy, plan.micro_batch_size // strategy.dp, plan.micro_batches)
            found.setdefault(key, {})[task.shape.layers] = values
    layers = []
    for (shape, strategy, micro_batch, micro_batches), by_layers in found.items():
        if len(by_layers) < 2 or strategy.zero or strategy.sequence_sharding:
            continue
        few, many = min(by_layers), max(by_layers)
        forward_s, step_s, optimizer_s = (
            max(by_layers[many][name] - by_layers[few][name], 0.0) / (many - few)
            for name in ("forward_s", "step_s", "optimizer_s")
        )
        passes_s = max(step_s - optimizer_s, forward_s)
        layers.append(
            LayerFigures(
                shape=shape,
                micro_batch=micro_batch,
                tensor=strategy.tp,
                forward_s=forward_s / micro_batches,
                backward_s=(passes_s - forward_s) / micro_batches,
                other_forward_s=max(by_layers[few]["forward_s"] - few * forward_s, 0.0) / micro_batches,
            )
        )
    return layers


def compute_activation_bytes(figures: Mapping[Task, Mapping[str, float]]) -> Mapping[GptShape, float]:
    """Return what one layer keeps of one sample, by shape, where two micro-batch sizes of two models were measured.

    The difference over layers at one micro-batch size also holds the layer's weights and their states; the difference
    over micro-batch sizes removes them.
    """
    peaks: dict[GptShape, dict[tuple[int, int], float]] = {}
    for task, values in figures.items():
        strategy = task.plan.stages[0].strategies[0] if isinstance(task, StepTask) else None
        if not isinstance(task, StepTask) or task.purpose != "probe" or strategy is None:
            continue
        if strategy.dp == task.plan.world_size and strategy.recompute.value == "none" and not strategy.zero:
            samples = task.plan.micro_batch_size // strategy.dp
            peak = values.get("allocated_bytes", values.get("peak_bytes", 0.0))
            peaks.setdefault(replace(task.shape, layers=1), {})[task.shape.layers, samples] = peak
    kept = {}
    for shape, found in peaks.items():
        layers, batches = sorted({each for each, _ in found}), sorted({each for _, each in found})
        few, many, small, large = layers[0], layers[-1], batches[0], batches[-1]
        corners = [(many, large), (few, large), (many, small), (few, small)]
        if few < many and small < large and all(corner in found for corner in corners):
            growth = found[many, large] - found[few, large] - found[many, small] + found[few, small]
            kept[shape] = growth / (many - few) / (large - small)
    return kept
