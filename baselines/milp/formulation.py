"""UniAP's mixed integer program (CVPR'25, section 3) for one instance, in linear form for HiGHS.

The linear form is a flow along the chain of layers.

One unit of flow runs from the first layer to the last. Its nodes are (chunk, group, layer, strategy), so that a node
variable of 1 determines the stage and the strategy of a layer. The flow stays in its chunk by an arc from class to
class, which pays for resharding, or leaves it and enters the next one through a cut, which pays for the hand-over.
Conservation of flow replaces UniAP's contiguity rows and its products of two variables: integer nodes determine
everything else. Strategies with equal layouts and equal border gathering are one class, because no arc can distinguish
them. A buffer is the sum of the steps between the distinct sizes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scheduler.solver.instance import Floats, Instance, Ints, Solution, StageCosts


@dataclass(frozen=True, slots=True, eq=False)
class HighsResult:
    """Result of a HiGHS run.

    `values` are those of all columns, empty without a solution. The bound is proven, and the time is by its own clock.
    """

    values: Floats
    bound: float
    proven: bool
    status: str
    time_s: float


class MilpModel:
    """A mixed integer program in sparse form.

    Minimize cost x under lower <= A x <= upper, 0 <= x <= upper, with some x integer.
    """

    def __init__(self) -> None:
        self.size = 0
        self._costs: list[Floats] = []
        self._mosts: list[Floats] = []
        self._whole: list[Ints] = []
        self._rows: list[tuple[float, float, Ints, Floats]] = []

    def add_columns(self, cost_s: ArrayLike, *, upper: float = 1.0, integer: bool = False) -> Ints:
        """Add columns and return their numbers, in the shape of their costs; an infinite cost fixes the column at 0."""
        costs = np.asarray(cost_s, dtype=np.float64)
        barred = np.isinf(costs)
        self._costs.append(np.where(barred, 0.0, costs).ravel())
        self._mosts.append(np.where(barred, 0.0, upper).ravel())
        self._whole.append(np.full(costs.size, integer, dtype=np.int64))
        self.size += costs.size
        return np.arange(self.size - costs.size, self.size).reshape(costs.shape)

    def add_row(self, *terms: tuple[ArrayLike, ArrayLike], lower: float = -inf, upper: float = inf) -> None:
        """Add a row over (columns, factors) pairs; infinite factors, those of fixed columns, count as 0."""
        indices = [np.asarray(columns, dtype=np.int64).ravel() for columns, _ in terms]
        shaped = [np.broadcast_to(np.asarray(factors, float), np.shape(columns)).ravel() for columns, factors in terms]
        factors = np.concatenate(shaped)
        kept = np.isfinite(factors) & (factors != 0.0)
        self._rows.append((lower, upper, np.concatenate(indices)[kept], factors[kept]))

    def add_equality(self, left: Ints, right: Ints) -> None:
        """Require that the sums of two sets of columns are equal."""
        self.add_row((left, 1.0), (right, -1.0), lower=0.0, upper=0.0)

    def solve(self, *, time_limit_s: float, cutoff: float) -> HighsResult:
        """Run HiGHS on one thread, to a gap of 0; solutions at or above `cutoff` are not searched.

        Raises:
            ModuleNotFoundError: highspy is not installed.
        """
        highspy = _import_highspy()
        highs = highspy.Highs()
        options = {"output_flag": False, "threads": 1, "random_seed": 0, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0}
        limits = {"time_limit": max(time_limit_s, 0.0), "objective_bound": cutoff}
        for name, value in {**options, **limits}.items():
            highs.setOptionValue(name, value)
        starts = np.cumsum([0, *(len(row[2]) for row in self._rows)])
        entries = int(starts[-1])
        highs.passModel(
            self.size,
            len(self._rows),
            entries,
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.concatenate(self._costs),
            np.zeros(self.size),
            np.concatenate(self._mosts),
            np.array([row[0] for row in self._rows]),
            np.array([row[1] for row in self._rows]),
            starts.astype(np.int32),
            np.concatenate([row[2] for row in self._rows]).astype(np.int32),
            np.concatenate([row[3] for row in self._rows]),
            np.concatenate(self._whole).astype(np.int32),
        )
        highs.run()
        return _read_result(highspy, highs, cutoff)


def _read_result(highspy: Any, highs: Any, cutoff: float) -> HighsResult:
    states = highspy.HighsModelStatus
    state, info = highs.getModelStatus(), highs.getInfo()
    found = info.primal_solution_status == highspy.kSolutionStatusFeasible
    none = state in (states.kInfeasible, states.kUnboundedOrInfeasible, states.kObjectiveBound)
    return HighsResult(
        values=np.array(highs.getSolution().col_value) if found and not none else np.empty(0),
        bound=cutoff if none else min(info.mip_dual_bound, cutoff),
        proven=none or state == states.kOptimal,
        status=highs.modelStatusToString(state).lower(),
        time_s=highs.getRunTime(),
    )


def _import_highspy() -> Any:
    try:
        import highspy
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "solver 'milp' needs highspy; install it: pip install 'ebbtide-server[milp]'"
        ) from None
    return highspy


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Columns of chunk `number` on one group, for the n layers from `first` that it may hold; S strategies, K classes.

    node   [n, S]       the layer has this strategy here
    stay   [n-1, K, K]  its neighbor is here too
    enter  [n, K]       it is the first of the chunk
    leave  [n, K]       it is the last of the chunk
    """

    number: int
    device: int
    group: int
    first: int
    node: Ints
    stay: Ints
    enter: Ints
    leave: Ints


class MilpFormulation:
    """The program of `instance`. Times have the unit `unit_s`, memory is in shares of the capacity.

    Only solutions whose largest load is at most `longest_s` are wanted.
    """

    def __init__(self, instance: Instance, unit_s: float, longest_s: float = inf) -> None:
        self.instance = instance
        self.model = MilpModel()
        self._unit_s = unit_s
        self._longest = self.model.add_columns(instance.objective.compute_time_s(0.0, 1.0), upper=longest_s / unit_s)
        numbers = range(instance.devices * instance.interleave)
        self._loads: list[list[tuple[Ints, Floats]]] = [[] for _ in range(instance.devices + len(instance.hand_over_s))]
        self._chunks = [
            self._add_chunk(number, group) for number in numbers for group in _list_groups(instance, number)
        ]
        self._add_cuts()
        self._add_device_assignment()
        for terms in self._loads:
            self.model.add_row((self._longest, 1.0), *((columns, -cost_s) for columns, cost_s in terms), lower=0.0)

    def forbid(self, solution: Solution, device: int) -> None:
        """Forbid that `device` has as many layers of each (type, strategy) as in `solution`, wherever they are.

        For each such pair a switch must be on to reach the number, and not all switches may be on.
        """
        mine = [chunk for chunk in self._chunks if (chunk.device, chunk.group) == (device, solution.order[device])]
        held = [u for chunk in mine for u in range(*solution.borders[chunk.number : chunk.number + 2])]
        pairs = Counter((int(self.instance.types[u]), solution.choice[u]) for u in held)
        switches = self.model.add_columns(np.zeros(len(pairs)), integer=True)
        self.model.add_row((switches, 1.0), upper=len(pairs) - 1.0)
        for switch, ((kind, strategy), count) in zip(switches, pairs.items(), strict=True):
            alike = [chunk.node[self._types(chunk) == kind, strategy] for chunk in mine]
            most = sum(map(len, alike))
            self.model.add_row(*((nodes, 1.0) for nodes in alike), (switch, count - 1.0 - most), upper=count - 1.0)

    def read_solution(self, values: Floats) -> Solution:
        """Return the solution for the values of the integer columns."""
        order, borders, choice = [], [], []
        for chunk in self._chunks:
            layers, strategies = np.nonzero(values[chunk.node] > 0.5)
            if len(layers):
                order.append(chunk.group)
                borders.append(chunk.first + int(layers[0]))
                choice += strategies.tolist()
        return Solution(tuple(order[: self.instance.devices]), (*borders, self.instance.layers), tuple(choice))

    def _types(self, chunk: _Chunk) -> Ints:
        return self.instance.types[chunk.first :][: len(chunk.node)]

    def _add_load_columns(self, load: int, cost_s: Floats, *, whole: bool = False) -> Ints:
        """Add columns that add `cost_s` to a device's load or, for numbers beyond the devices, to a link's."""
        units = cost_s / self._unit_s
        columns = self.model.add_columns(self.instance.objective.compute_time_s(1.0, 0.0) * units, integer=whole)
        self._loads[load].append((columns, units))
        return columns

    def _add_chunk(self, number: int, group: int) -> _Chunk:
        instance, costs, device = self.instance, self.instance.costs[group], number % self.instance.devices
        first, end = _layer_range(instance, number)
        types = instance.types[first:end]
        classes, layouts, border_s = _classify_strategies(costs)
        needs = (costs.compute_memory_bytes(instance.in_flight[device]) + costs.working_bytes)[types]
        enter_s, leave_s = border_s[types], border_s[types]
        if first == 0:
            enter_s[:] = np.where(np.arange(len(types)) == 0, 0.0, inf)[:, None]
        if end == instance.layers:
            leave_s[:] = np.where(np.arange(len(types)) == len(types) - 1, 0.0, inf)[:, None]
        chunk = _Chunk(
            number=number,
            device=device,
            group=group,
            first=first,
            node=self._add_load_columns(
                device, np.where(needs <= instance.capacity_bytes[group], costs.time_s[types], inf), whole=True
            ),
            stay=self._add_load_columns(device, costs.reshard_s[types[:-1]][:, layouts[:, None], layouts]),
            enter=self._add_load_columns(device, enter_s),
            leave=self._add_load_columns(device, leave_s),
        )
        self._add_flow_conservation(chunk, classes)
        return chunk

    def _add_flow_conservation(self, chunk: _Chunk, classes: Ints) -> None:
        """Require that the flow into the nodes of a class equals the flow out of them."""
        for u, kind in np.ndindex(chunk.enter.shape):
            nodes = chunk.node[u, classes == kind]
            self.model.add_equality(nodes, np.append(chunk.enter[u, kind], chunk.stay[max(u - 1, 0) : u, :, kind]))
            self.model.add_equality(nodes, np.append(chunk.leave[u, kind], chunk.stay[u : u + 1, kind]))

    def _add_cuts(self) -> None:
        """Require that leaving a chunk after a layer is entering the next chunk at the next layer."""
        instance = self.instance
        cuts = {
            (before, after): self._add_load_columns(
                instance.devices + before.device,
                instance.hand_over_s[before.device, before.group, after.group],
                whole=True,
            )
            for before, after in product(self._chunks, repeat=2)
            if after.number == before.number + 1
        }
        for chunk in self._chunks:
            self._link_cuts([cut for (before, _), cut in cuts.items() if before is chunk], chunk.leave, chunk.first + 1)
            self._link_cuts([cut for (_, after), cut in cuts.items() if after is chunk], chunk.enter, chunk.first)

    def _link_cuts(self, cuts: list[Ints], arcs: Ints, start: int) -> None:
        """Require that the flow through `arcs[u]` goes through the cuts before layer start + u."""
        for at in range(1, self.instance.layers) if cuts else ():
            arc = at - start
            self.model.add_equality(np.array([cut[at] for cut in cuts]), arcs[max(arc, 0) : max(arc + 1, 0)])

    def _add_device_assignment(self) -> None:
        """Assign each device to one group.

        Each group uses all its devices, and their memory suffices.
        """
        used: list[list[Ints]] = [[] for _ in self.instance.counts]
        starts = [(chunk.enter, 1.0) for chunk in self._chunks if chunk.number == 0]
        self.model.add_row(*starts, lower=1.0, upper=1.0)
        for chunk in self._chunks:
            if chunk.number == chunk.device:
                use = self.model.add_columns(0.0, integer=True)
                self.model.add_equality(use, chunk.enter)
                used[chunk.group].append(use)
                self._add_memory_limit(
                    [other for other in self._chunks if (other.device, other.group) == (chunk.device, chunk.group)], use
                )
        for columns, count in zip(used, self.instance.counts, strict=True):
            self.model.add_row((np.array(columns), 1.0), lower=count, upper=count)

    def _add_memory_limit(self, chunks: list[_Chunk], use: Ints) -> None:
        """Require that the chunks of one device fit into its memory and its host's if it is of their group (`use`)."""
        instance, group, device = self.instance, chunks[0].group, chunks[0].device
        costs, limit = instance.costs[group], max(instance.capacity_bytes[group], 1) / 100
        sizes = np.unique(costs.working_bytes)
        steps = self.model.add_columns(np.zeros(len(sizes) - 1))
        needs = costs.compute_memory_bytes(instance.in_flight[device]) / limit
        layers = ((chunk.node, needs[self._types(chunk)]) for chunk in chunks)
        self.model.add_row(
            *layers,
            (steps, np.diff(sizes) / limit),
            (use, (sizes[0] - instance.capacity_bytes[group]) / limit),
            upper=0.0,
        )
        held = costs.compute_host_bytes(instance.in_flight[device])
        if instance.host_capacity_bytes and held is not None:
            host_limit = max(instance.host_capacity_bytes[group], 1) / 100
            on_host = ((chunk.node, held[self._types(chunk)] / host_limit) for chunk in chunks)
            self.model.add_row(*on_host, (use, -instance.host_capacity_bytes[group] / host_limit), upper=0.0)
        for (step, size), chunk in product(zip(steps, sizes[1:], strict=True), chunks):
            for nodes in chunk.node[:, costs.working_bytes >= size]:
                self.model.add_row((nodes, 1.0), (step, -1.0), upper=0.0)


def _list_groups(instance: Instance, number: int) -> tuple[int, ...]:
    """Return the groups that the device of a chunk may be of."""
    groups = tuple(range(len(instance.counts)))
    if not instance.borders:
        return groups
    return (int(np.repeat(groups, instance.counts)[number % instance.devices]),)


def _layer_range(instance: Instance, number: int) -> tuple[int, int]:
    """Return first and end of the layers that a chunk may hold: every other chunk needs one layer."""
    if instance.borders:
        return instance.borders[number], instance.borders[number + 1]
    if instance.stage_layers:
        return number * instance.stage_layers, (number + 1) * instance.stage_layers
    after = instance.devices * instance.interleave - 1 - number
    return number, instance.layers - after


def _classify_strategies(costs: StageCosts) -> tuple[Ints, Ints, Floats]:
    """Return the class of each strategy [S], and layout [K] and border gathering [T, K] of each class."""
    features = np.vstack([costs.layouts, costs.border_s])
    kinds, classes = np.unique(features, axis=1, return_inverse=True)
    return classes.ravel(), kinds[0].astype(np.int64), kinds[1:]
