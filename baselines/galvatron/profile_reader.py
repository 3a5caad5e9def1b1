"""Reads a Galvatron profile folder. `spec.json` names the model's files; the shape of the cluster names the others.

The files are those of Galvatron (github.com/PKU-DAIR/Hetu-Galvatron), with its three ways of profiling time and two of
memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from baselines.galvatron import profiles
from baselines.galvatron.profiles import ByDegree, JsonField
from scheduler.solver.instance import Floats
from scheduler.solver.profiles.profile_document import ProfileError

_COUNT = r"([1-9]\d{0,8})"
_Points = Sequence[tuple[float, float]]


def read_case(folder: Path) -> profiles.GalvatronCase:
    """Read the profile in `folder` and the question in its `spec.json`.

    Raises:
        ProfileError: a file or field is missing, or has an invalid value.
    """
    spec = JsonField.from_file(folder / "spec.json")
    chunk, reduced = spec.get("chunk"), spec["async_grad_reduce"]
    if not isinstance(reduced.value, bool):
        reduced.reject("true or false")
    return profiles.GalvatronCase(
        model=_read_model(folder, spec),
        cluster=_read_cluster(folder, spec["nodes"].read_int(), spec["gpus_per_node"].read_int()),
        async_reduce=reduced.value,
        memory_gb=spec["memory_gb"].read_number(),
        global_batch=spec["global_batch"].read_int(),
        micro_batches=None if chunk.value is None else chunk.read_int(),
    )


def _read_cluster(folder: Path, nodes: int, gpus_per_node: int) -> profiles.ClusterProfile:
    shape = f"{nodes}nodes_{gpus_per_node}gpus_per_node.json"
    all_reduce = JsonField.from_file(folder / f"allreduce_bandwidth_{shape}")
    latencies = JsonField.from_file(folder / f"sp_time_{shape}")
    return profiles.ClusterProfile(
        gpus=nodes * gpus_per_node,
        neighbour_ms_per_mb=_read_ms_per_mb(all_reduce, "allreduce_size_{}_consec_1"),
        strided_ms_per_mb=_read_ms_per_mb(all_reduce, "allreduce_size_{}_consec_0"),
        p2p_ms_per_mb=_read_ms_per_mb(JsonField.from_file(folder / f"p2p_bandwidth_{shape}"), "pp_size_{}"),
        overlap=JsonField.from_file(folder / "overlap_coefficient.json")["overlap_coe"].read_number(minimum=1.0),
        # An all-gather or reduce-scatter is half an all-reduce.
        all_gather=_read_latencies(latencies, "allreduce", 0.5),
        all_to_all=_read_latencies(latencies, "all2all", 1.0),
    )


def _match_fields(document: JsonField, form: str) -> Iterator[tuple[list[int], float]]:
    """Yield counts and number of each member whose name matches `form`, in which each {} stands for a count."""
    pattern = re.compile(form.replace("{}", _COUNT), re.ASCII)
    for key, entry in document.members().items():
        if found := pattern.fullmatch(key):
            yield [int(count) for count in found.groups()], entry.read_number()


def _read_ms_per_mb(document: JsonField, form: str) -> ByDegree[float]:
    """Return times by group size; 1 GB/s in the profile is 1 MB/ms."""
    name = f"{document.name} ({form.format('N')})"
    return ByDegree(name, [(degree, 1.0 / speed) for (degree,), speed in _match_fields(document, form)])


def _read_latencies(document: JsonField, operation: str, factor: float) -> ByDegree[profiles.LatencyTable]:
    points: dict[int, dict[float, float]] = {}
    for (group, message_mb), ms in _match_fields(document, operation + "_size_{}_{}MB_time"):
        points.setdefault(group, {})[float(message_mb)] = ms * factor
    name = f"{document.name} ({operation}_size)"
    lines = {group: _fit_line(list(table.items()), f"{name} at degree {group}") for group, table in points.items()}
    return ByDegree(name, [(group, profiles.LatencyTable(points[group], line)) for group, line in lines.items()])


def _read_model(folder: Path, spec: JsonField) -> profiles.ModelProfile:
    """Read the model's profile.

    `static` memory has entries of the model's own sequence length. `sequence` takes parameters from the shortest
    profiled length and all else from the longest, with activations in proportion to the sequence.
    """
    sequence = spec["seq"].read_int()
    times = JsonField.from_file(folder / spec["time_file"].read_text())
    memory = JsonField.from_file(folder / spec["memory_file"].read_text())
    layer = memory["layertype_0_sp"]
    lengths = layer.list_degrees() if spec["memory_mode"].read_choice("static", "sequence") == "sequence" else []
    shortest, longest = min(lengths, default=sequence), max(lengths, default=sequence)
    activation = layer[str(longest)]["tp_activation_per_bsz_dict"]

    def scale_to_sequence(table: ByDegree[float]) -> ByDegree[float]:
        return ByDegree(table.name, [(degree, mb / longest * sequence) for degree, mb in table.items()])

    def embedding(place: str) -> profiles.EmbeddingMemory:
        entry = memory[f"other_memory_pp_{place}_sp"][str(longest)]
        return profiles.EmbeddingMemory(
            entry["model_states"].read_by_degree(), scale_to_sequence(entry["activation"].read_by_degree())
        )

    return profiles.ModelProfile(
        name=spec["name"].read_text(),
        layers=spec["layers"].read_int(),
        hidden=spec["hidden"].read_int(),
        sequence=sequence,
        layer_forward_ms=_read_forward_time(times, "0", spec),
        embedding_forward_ms=_read_forward_time(times, "other", spec),
        parameter_mb=layer[str(shortest)]["parameter_size"].read_number(),
        activation_mb=scale_to_sequence(activation.read_by_degree()),
        recompute_mb=activation["checkpoint"].read_number() / longest * sequence,
        alone=embedding("off"),
        first=embedding("on_first"),
        last=embedding("on_last"),
    )


def _read_forward_time(times: JsonField, part: str, spec: JsonField) -> profiles.LinearFit:
    """Return the forward time (ms) of `part` by samples per GPU; the file gives it per sample."""
    sequence = spec["seq"].read_int()
    mode = spec["time_mode"].read_choice("static", "batch", "sequence")
    field = f"{times.name}.layertype_{part}"
    points = [
        (samples, length, ms) for (samples, length), ms in _match_fields(times, f"layertype_{part}_bsz{{}}_seq{{}}")
    ]
    if mode == "sequence":
        single = [(length, ms) for samples, length, ms in points if samples == 1]
        curve = _fit_polynomial(single, 1 if part == "other" else 2, field)
        return profiles.LinearFit(max(0.0, float(np.polyval(curve, sequence))))
    same = [(samples, ms * samples) for samples, length, ms in points if length == sequence]
    if mode == "batch":
        return _fit_line(same, field)
    if len(same) != 1:
        raise ProfileError(f"{field} has {len(same)} entries of sequence {sequence}; it must have exactly one")
    return profiles.LinearFit(same[0][1] / same[0][0])


def _fit_line(points: _Points, field: str) -> profiles.LinearFit:
    slope, intercept = _fit_polynomial(points, 1, field).tolist()
    return profiles.LinearFit(slope, intercept)


def _fit_polynomial(points: _Points, power: int, field: str) -> Floats:
    """Return least-squares coefficients, highest power first.

    Points are scaled to 1 for a well-conditioned normal matrix.
    """
    distinct = {x for x, _ in points}
    if len(distinct) <= power:
        raise ProfileError(f"{field} is profiled at {sorted(distinct)}; it must be at {power + 1} or more points")
    xs, ys = np.array(points, dtype=np.float64).T
    solution = np.linalg.lstsq(np.vander(xs / xs.max(), power + 1), ys, rcond=None)[0]
    return np.asarray(solution / xs.max() ** np.arange(power, -1, -1))
