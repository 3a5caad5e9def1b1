"""A token-by-token simulation of serving replicas: the referee of the capacity model.

It shares no formula and no import with `scheduler.serving`. Both get the same plain numbers: the seconds of an
iteration and the limits of a replica. A replica forms a batch for each iteration, as vLLM does (arXiv 2309.06180):
each running request gets one token, and prompts fill what is left of the token budget, in chunks (Sarathi-Serve, arXiv
2403.02310) or, without chunks, alone and before any decoding (Orca, OSDI'22). A prompt is admitted first come, first
served, when its tokens fit into the KV cache. If the cache overflows, the request that was admitted last is preempted
and computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PROMPT_WEIGHT = 1_000_000
"""Routing compares the prompt tokens that wait for computation first, and the requests of a replica after that."""


class ReplicaNumbers(NamedTuple):
    """The seconds of an iteration by part, and the limits of a replica.

    `attention_pair_s` is of one prompt token and one token before it, `kv_token_s` of one cached token that a decoding
    request reads.
    """

    base_s: float
    prefill_token_s: float
    attention_pair_s: float
    decode_sequence_s: float
    kv_token_s: float
    batched_tokens: int
    sequences: int
    kv_tokens: int
    chunked: bool = True


class Arrival(NamedTuple):
    """A request: arrival in seconds, tokens of its prompt and of its output."""

    at_s: float
    prompt: int
    output: int


@dataclass(slots=True)
class SimulatedRequest:
    """One request. `owed` are the prompt tokens still to compute, `resume` the outputs that it had when preempted."""

    arrival: Arrival
    owed: int
    done: int = 0
    resume: int = 0
    first_s: float = -1.0
    end_s: float = -1.0
    start_step: int = 0
    preemptions: int = 0
    finish_step: int = -1

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.first_s) / (self.arrival.output - 1)


class SimulatedReplica:
    """One replica. `busy_until_s` is the end of its iteration, or negative if it is idle."""

    __slots__ = (
        "_chunks",
        "_context",
        "_decoding",
        "_heap",
        "_numbers",
        "_order",
        "_prefilling",
        "_queued",
        "_sequence",
        "_step",
        "_used",
        "_waiting",
        "busy_until_s",
        "iterations",
        "running_total",
    )

    def __init__(self, numbers: ReplicaNumbers) -> None:
        self._numbers = numbers
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[SimulatedRequest] = deque()
        self._order: list[SimulatedRequest] = []
        self._heap: list[tuple[int, int, SimulatedRequest]] = []
        self._chunks: list[SimulatedRequest] = []
        self._step = self._decoding = self._context = self._used = self._queued = self._sequence = 0
        self.busy_until_s = -1.0
        self.iterations = 0
        self.running_total = 0

    @property
    def score(self) -> int:
        """Order of replicas for the router: the least loaded first."""
        return PROMPT_WEIGHT * self._queued + self._decoding + len(self._prefilling) + len(self._waiting)

    def add(self, request: SimulatedRequest) -> None:
        self._waiting.append(request)
        self._queued += request.owed

    def start(self, now_s: float) -> None:
        """Form the next batch, or become idle."""
        numbers = self._numbers
        self._admit()
        if not self._decoding and not self._prefilling:
            self.busy_until_s = -1.0
            return
        alone = not numbers.chunked and bool(self._prefilling)
        if not alone:
            while self._used + self._decoding > numbers.kv_tokens:
                self._preempt_last()
        decoded = 0 if alone else self._decoding
        spent_s, budget = numbers.base_s, numbers.batched_tokens - decoded
        for request in self._prefilling:
            if budget <= 0:
                break
            tokens = min(budget, request.owed)
            if not numbers.chunked and tokens < request.owed and budget < numbers.batched_tokens:
                break
            tokens = tokens if numbers.chunked else request.owed
            pairs = tokens * (request.done + tokens / 2)
            spent_s += numbers.prefill_token_s * tokens + numbers.attention_pair_s * pairs
            request.done += tokens
            request.owed -= tokens
            self._queued -= tokens
            budget -= tokens
            self._chunks.append(request)
        if decoded:
            spent_s += numbers.decode_sequence_s * decoded + numbers.kv_token_s * (self._context + decoded)
            self._step += 1
            self._context += decoded
            self._used += decoded
        self.iterations += 1
        self.running_total += self._decoding
        self.busy_until_s = now_s + spent_s

    def finish(self, now_s: float) -> None:
        """End the iteration: outputs, first tokens and releases of cache."""
        heap = self._heap
        while heap and heap[0][0] <= self._step:
            step, _, request = heappop(heap)
            if request.finish_step != step or request.end_s >= 0:
                continue
            request.end_s = now_s
            self._decoding -= 1
            held = request.arrival.prompt + request.arrival.output - 1
            self._context -= held
            self._used -= held
        for request in self._chunks:
            if not request.owed:
                self._prefilling.remove(request)
                self._begin_decoding(request, now_s)
        self._chunks.clear()

    def _begin_decoding(self, request: SimulatedRequest, now_s: float) -> None:
        if request.first_s < 0:
            request.first_s = now_s
        request.resume += 1
        if request.resume >= request.arrival.output:
            request.end_s = now_s
            self._used -= request.done
            return
        request.start_step = self._step
        request.finish_step = self._step + request.arrival.output - request.resume
        self._sequence += 1
        heappush(self._heap, (request.finish_step, self._sequence, request))
        self._decoding += 1
        self._context += request.done
        self._order.append(request)

    def _admit(self) -> None:
        numbers = self._numbers
        while self._waiting and self._decoding + len(self._prefilling) < numbers.sequences:
            need = self._waiting[0].owed
            if self._used + self._decoding + need + 1 > numbers.kv_tokens:
                return
            request = self._waiting.popleft()
            self._used += need
            self._prefilling.append(request)

    def _preempt_last(self) -> None:
        while self._order and (self._order[-1].end_s >= 0 or self._order[-1].finish_step < 0):
            self._order.pop()
        request = self._order.pop()
        grown = self._step - request.start_step
        held = request.done + grown
        self._decoding -= 1
        self._context -= held
        self._used -= held
        request.resume += grown
        # Its last output is not in the cache yet: the next iteration would have computed it.
        request.owed, request.done, request.finish_step = held + 1, 0, -1
        request.preemptions += 1
        self._queued += request.owed
        self._waiting.appendleft(request)


class ServingReport(NamedTuple):
    """Latencies in seconds of the requests that arrived in the measured part of a simulation, and what replicas did."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    preemptions: int
    running_mean: float
    end_s: float

    def meets(self, ttft_s: float, tpot_s: float, share: float) -> bool:
        """Return whether `share` of the requests meet each bound."""
        return bool(np.mean(self.ttft_s <= ttft_s) >= share and np.mean(self.tpot_s <= tpot_s) >= share)


def simulate(
    numbers: ReplicaNumbers, replicas: int, arrivals: Sequence[Arrival], *, measured: tuple[float, float] = (0.0, 1.0)
) -> ServingReport:
    """Simulate arrivals, in ascending order of time, on a pool. `measured` are shares of the arrivals by order.

    Raises:
        ValueError: a request needs more KV cache than a replica has.
    """
    pool = [SimulatedReplica(numbers) for _ in range(replicas)]
    scores = [0] * replicas
    ends: list[tuple[float, int]] = []
    requests = [SimulatedRequest(arrival, arrival.prompt) for arrival in arrivals]
    for request in requests:
        _run_until(pool, scores, ends, request.arrival.at_s)
        chosen = scores.index(min(scores))
        replica = pool[chosen]
        replica.add(request)
        if replica.busy_until_s < 0:
            replica.start(request.arrival.at_s)
            heappush(ends, (replica.busy_until_s, chosen))
        scores[chosen] = replica.score
    end_s = _run_until(pool, scores, ends, float("inf"))
    if any(request.end_s < 0 for request in requests):
        raise ValueError("one request needs more KV cache than the replica has")
    begin, end = (round(share * len(requests)) for share in measured)
    chosen_requests = requests[begin:end]
    iterations = sum(replica.iterations for replica in pool)
    return ServingReport(
        np.array([request.ttft_s for request in chosen_requests]),
        np.array([request.tpot_s for request in chosen_requests if request.arrival.output > 1]),
        sum(request.preemptions for request in chosen_requests),
        sum(replica.running_total for replica in pool) / max(iterations, 1),
        end_s,
    )


def _run_until(
    pool: Sequence[SimulatedReplica], scores: list[int], ends: list[tuple[float, int]], until_s: float
) -> float:
    now_s = 0.0
    while ends and ends[0][0] <= until_s:
        now_s, index = heappop(ends)
        replica = pool[index]
        replica.finish(now_s)
        replica.start(now_s)
        scores[index] = replica.score
        if replica.busy_until_s >= 0:
            heappush(ends, (replica.busy_until_s, index))
    return now_s


def draw_arrivals(
    generator: np.random.Generator, rate_per_s: float, lengths: NDArray[np.int64], *, scv: float = 1.0
) -> Iterator[Arrival]:
    """Yield one arrival for each row (prompt, output) of `lengths`.

    Times between arrivals have a gamma distribution with the squared coefficient of variation `scv`; 1 is Poisson.
    """
    gaps_s = generator.gamma(1 / scv, scv / rate_per_s, len(lengths))
    for at_s, (prompt, output) in zip(np.cumsum(gaps_s).tolist(), lengths.tolist(), strict=True):
        yield Arrival(at_s, prompt, output)
