"""UniAP's programme (CVPR'25, section 3) for one instance, linearised as a flow along the chain of layers.

One unit of flow runs from the first layer to the last. Its nodes are (chunk, group, layer, strategy), so that a whole
node says which stage and which strategy a layer has. The flow stays in its chunk by an arc from class to class, which
pays for resharding, or leaves it and enters the next one through a cut, which pays for the hand-over. Conservation of
flow stands for UniAP's contiguity rows and for its products of two variables: whole nodes settle everything else.
Strategies with equal layouts and equal border gathering are one class, because no arc can tell them apart. A buffer is
the sum of the steps between the distinct sizes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np

from scheduler.solver.instance import Floats, Instance, Ints, Solution, StageCosts
from scheduler.solver.referee.programme import Programme


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Columns of chunk `number` on one group, for the n layers from `first` that it may hold; S strategies, K classes.

    node   [n, S]       the layer has this strategy here
    stay   [n-1, K, K]  its neighbour is here too
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


class Formulation:
    """The programme of `instance`; times are counted in `unit_s`, memory in shares of the capacity.

    Only solutions whose largest load is at most `longest_s` are wanted.
    """

    def __init__(self, instance: Instance, unit_s: float, longest_s: float = inf) -> None:
        self.instance = instance
        self.programme = Programme()
        self._unit_s = unit_s
        self._longest = self.programme.columns(instance.objective.time_s(0.0, 1.0), most=longest_s / unit_s)
        numbers = range(instance.devices * instance.interleave)
        self._loads: list[list[tuple[Ints, Floats]]] = [[] for _ in range(instance.devices + len(instance.hand_over_s))]
        self._chunks = [self._chunk(number, group) for number in numbers for group in _groups(instance, number)]
        self._cuts()
        self._use()
        for terms in self._loads:
            self.programme.row((self._longest, 1.0), *((columns, -cost_s) for columns, cost_s in terms), lower=0.0)

    def forbid(self, solution: Solution, device: int) -> None:
        """Forbids that `device` has as many layers of each (type, strategy) as in `solution`, wherever they lie.

        For each such pair a switch must be on to reach the number, and not all the switches may be.
        """
        mine = [one for one in self._chunks if (one.device, one.group) == (device, solution.order[device])]
        held = [u for one in mine for u in range(*solution.borders[one.number : one.number + 2])]
        pairs = Counter((int(self.instance.types[u]), solution.choice[u]) for u in held)
        switches = self.programme.columns(np.zeros(len(pairs)), whole=True)
        self.programme.row((switches, 1.0), upper=len(pairs) - 1.0)
        for switch, ((kind, strategy), count) in zip(switches, pairs.items(), strict=True):
            alike = [one.node[self._types(one) == kind, strategy] for one in mine]
            most = sum(map(len, alike))
            self.programme.row(*((nodes, 1.0) for nodes in alike), (switch, count - 1.0 - most), upper=count - 1.0)

    def read(self, values: Floats) -> Solution:
        """The solution that whole columns stand for."""
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

    def _loading(self, load: int, cost_s: Floats, *, whole: bool = False) -> Ints:
        """New columns that add `cost_s` to a device's load, or beyond the devices to a link's."""
        units = cost_s / self._unit_s
        columns = self.programme.columns(self.instance.objective.time_s(1.0, 0.0) * units, whole=whole)
        self._loads[load].append((columns, units))
        return columns

    def _chunk(self, number: int, group: int) -> _Chunk:
        instance, costs, device = self.instance, self.instance.costs[group], number % self.instance.devices
        first, end = _reach(instance, number)
        types = instance.types[first:end]
        classes, layouts, border_s = _classes(costs)
        needs = (costs.memory_bytes(instance.in_flight[device]) + costs.working_bytes)[types]
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
            node=self._loading(
                device, np.where(needs <= instance.capacity_bytes[group], costs.time_s[types], inf), whole=True
            ),
            stay=self._loading(device, costs.reshard_s[types[:-1]][:, layouts[:, None], layouts]),
            enter=self._loading(device, enter_s),
            leave=self._loading(device, leave_s),
        )
        self._conserve(chunk, classes)
        return chunk

    def _conserve(self, chunk: _Chunk, classes: Ints) -> None:
        """What comes into the nodes of a class goes out of them."""
        for u, kind in np.ndindex(chunk.enter.shape):
            nodes = chunk.node[u, classes == kind]
            self.programme.equal(nodes, np.append(chunk.enter[u, kind], chunk.stay[max(u - 1, 0) : u, :, kind]))
            self.programme.equal(nodes, np.append(chunk.leave[u, kind], chunk.stay[u : u + 1, kind]))

    def _cuts(self) -> None:
        """Leaving a chunk after a layer is entering the next chunk at the next layer."""
        instance = self.instance
        cuts = {
            (before, after): self._loading(
                instance.devices + before.device,
                instance.hand_over_s[before.device, before.group, after.group],
                whole=True,
            )
            for before, after in product(self._chunks, repeat=2)
            if after.number == before.number + 1
        }
        for chunk in self._chunks:
            self._join([cut for (before, _), cut in cuts.items() if before is chunk], chunk.leave, chunk.first + 1)
            self._join([cut for (_, after), cut in cuts.items() if after is chunk], chunk.enter, chunk.first)

    def _join(self, cuts: list[Ints], arcs: Ints, start: int) -> None:
        """What goes through `arcs[u]` goes through the cuts before layer start + u."""
        for at in range(1, self.instance.layers) if cuts else ():
            arc = at - start
            self.programme.equal(np.array([cut[at] for cut in cuts]), arcs[max(arc, 0) : max(arc + 1, 0)])

    def _use(self) -> None:
        """A device is of one group, a group gives as many devices as it has, and their memory suffices."""
        used: list[list[Ints]] = [[] for _ in self.instance.counts]
        starts = [(chunk.enter, 1.0) for chunk in self._chunks if chunk.number == 0]
        self.programme.row(*starts, lower=1.0, upper=1.0)
        for chunk in self._chunks:
            if chunk.number == chunk.device:
                use = self.programme.columns(0.0, whole=True)
                self.programme.equal(use, chunk.enter)
                used[chunk.group].append(use)
                self._fit([one for one in self._chunks if (one.device, one.group) == (chunk.device, chunk.group)], use)
        for columns, count in zip(used, self.instance.counts, strict=True):
            self.programme.row((np.array(columns), 1.0), lower=count, upper=count)

    def _fit(self, chunks: list[_Chunk], use: Ints) -> None:
        """The chunks of one device fit into it, if it is of their group (`use`)."""
        instance, group, device = self.instance, chunks[0].group, chunks[0].device
        costs, limit = instance.costs[group], max(instance.capacity_bytes[group], 1) / 100
        sizes = np.unique(costs.working_bytes)
        steps = self.programme.columns(np.zeros(len(sizes) - 1))
        needs = costs.memory_bytes(instance.in_flight[device]) / limit
        layers = ((chunk.node, needs[self._types(chunk)]) for chunk in chunks)
        self.programme.row(
            *layers,
            (steps, np.diff(sizes) / limit),
            (use, (sizes[0] - instance.capacity_bytes[group]) / limit),
            upper=0.0,
        )
        for (step, size), chunk in product(zip(steps, sizes[1:], strict=True), chunks):
            for nodes in chunk.node[:, costs.working_bytes >= size]:
                self.programme.row((nodes, 1.0), (step, -1.0), upper=0.0)


def _groups(instance: Instance, number: int) -> tuple[int, ...]:
    """Groups that the device of a chunk may be of."""
    groups = tuple(range(len(instance.counts)))
    if not instance.borders:
        return groups
    return (int(np.repeat(groups, instance.counts)[number % instance.devices]),)


def _reach(instance: Instance, number: int) -> tuple[int, int]:
    """First and end of the layers that a chunk may hold: every other chunk needs one."""
    if instance.borders:
        return instance.borders[number], instance.borders[number + 1]
    after = instance.devices * instance.interleave - 1 - number
    return number, instance.layers - after


def _classes(costs: StageCosts) -> tuple[Ints, Ints, Floats]:
    """Class of each strategy [S]; layout [K] and border gathering [T, K] of each class."""
    features = np.vstack([costs.layouts, costs.border_s])
    kinds, classes = np.unique(features, axis=1, return_inverse=True)
    return classes.ravel(), kinds[0].astype(np.int64), kinds[1:]
