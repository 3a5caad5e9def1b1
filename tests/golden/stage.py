"""Run golden scenarios: lines of words in, the events of ticks with a simulated executor out."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace

from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.commands import (
    AddNode,
    CancelJob,
    ChangeNode,
    Command,
    CommandBody,
    CordonNode,
    CreatePool,
    CreateQueue,
    CurveSolved,
    ForecastMade,
    PauseLending,
    RecallAll,
    ReportDemand,
    ReportProgress,
    ResumeJob,
    ResumeLending,
    ScaleJob,
    SetLendingPolicy,
    SubmitJob,
    SuspendJob,
    VetoLoan,
)
from scheduler.domain.events import Event
from scheduler.domain.fleet import Forecast
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.lending_policy import LendingMode, LendingPolicy
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.domain.parallel_plan import Stage as PipelineStage
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.tick_report import Breach, TickReport
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.executors.simulated_run import Delays
from scheduler.runtime.clock import ManualClock
from scheduler.runtime.reconciler import tick
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.store.memory_store import MemoryStore
from tests.builders import GPU, a_fleet

Words = list[str]
_USUAL_LENDING = {"mode": "lend", "notice_s": "0", "veto_s": "3600"}
_LENDING = LendingPolicy(return_deadline_s=300.0, cold_start_s=300.0, headroom=0.0)


class Stage:
    """Plays a scenario line by line. `run N` advances the time by N seconds; other lines take effect now."""

    def __init__(self, on_report: Callable[[TickReport], object] = lambda report: None) -> None:
        self._on_report = on_report
        self.output: list[str] = []
        self._clock = ManualClock()
        self._store = MemoryStore()
        lease = self._store.acquire_lease("golden", now_s=0.0, ttl_s=float("inf"))
        assert lease is not None
        self._epoch = lease.epoch
        self._policies = load_policy_set("ebbtide")
        self._executor = SimulatedExecutor(())
        self._breaches: tuple[Breach, ...] = ()
        self._ticks = 0
        self._sent = 0

    def play(self, line: str) -> None:
        verb, *words = shlex.split(line)
        verbs: dict[str, Callable[[Words], None]] = {
            "fleet": self._fleet,
            "policy": self._policy,
            "queue": self._queue,
            "demand": self._demand,
            "stale-after": self._stale_after,
            "forecast": self._forecast,
            "submit": self._submit,
            "burst": self._burst,
            "solve": self._solve,
            "solve-mixed": self._solve_mixed,
            "solve-tensor": self._solve_tensor,
            "scale": lambda w: self._send(ScaleJob(w[0], *(int(n) for n in w[1].split("..")))),
            "cancel": lambda w: self._send(CancelJob(w[0])),
            "suspend": lambda w: self._send(SuspendJob(w[0])),
            "resume": lambda w: self._send(ResumeJob(w[0])),
            "lending": self._change_lending,
            "lend-part": self._lend_part,
            "veto": self._veto,
            "shadow": self._show_shadow,
            "drain": lambda w: self._send(CordonNode(w[0], drain=True)),
            "pause-lending": lambda w: self._send(PauseLending()),
            "resume-lending": lambda w: self._send(ResumeLending()),
            "recall-all": lambda w: self._send(RecallAll()),
            "node-down": lambda w: self._executor.fail_node(w[0]),
            "node-up": lambda w: self._executor.restore_node(w[0]),
            "die-of-memory": self._run_out_of_memory,
            "crash": lambda w: self._expect(self._executor.crash_job(w[0])),
            "slow-save": lambda w: self._expect(self._executor.delay_save(w[0], float(w[1]))),
            "freeze": self._freeze,
            "ranks": self._show_ranks,
            "run": self._run,
        }
        verbs[verb](words)

    def _fleet(self, words: Words) -> None:
        """`fleet training=NODESxGPUS inference=NODESxGPUS [MODEL]`: the model is that of the inference nodes."""
        sizes = {name: [int(n) for n in size.split("x")] for name, size in (word.split("=") for word in words[:2])}
        (training, per_node), (inference, _) = sizes["training"], sizes["inference"]
        pools, nodes = a_fleet(training=training, inference=inference, gpus_per_node=per_node, lending=_LENDING)
        for model in words[2:]:
            nodes |= {name: replace(node, gpu=model) for name, node in nodes.items() if node.pool == "inference"}
        self._executor = SimulatedExecutor(nodes.values(), delays=Delays(drain_s=20.0))
        for pool in pools.values():
            self._send(CreatePool(pool))
        for node in nodes.values():
            self._send(AddNode(node))

    def _policy(self, words: Words) -> None:
        self._policies = load_policy_set(words[0])

    def _queue(self, words: Words) -> None:
        given = dict(word.split("=") for word in words[1:])
        limit = given.get("limit")
        queue = JobQueue(words[0], int(given.get("guaranteed", "0")), int(limit) if limit else None)
        of_user = given.get("user-limit")
        self._send(CreateQueue(replace(queue, user_limit_gpus=int(of_user) if of_user else None)))

    def _stale_after(self, words: Words) -> None:
        """`stale-after POOL SECONDS [LOST]`: demand is stale at this age, and lost at the second one."""
        lost_s = float(words[2]) if words[2:] else None
        lending = replace(_LENDING, demand_stale_s=float(words[1]), demand_lost_s=lost_s)
        self._send(SetLendingPolicy(words[0], lending))

    def _change_lending(self, words: Words) -> None:
        """`lending POOL FIELD=VALUE...`: the fields mode, notice_s and veto_s."""
        given = dict(word.split("=") for word in words[1:])
        mode, notice_s, veto_s = (given.get(name, usual) for name, usual in _USUAL_LENDING.items())
        lending = replace(_LENDING, mode=LendingMode(mode), notice_s=float(notice_s), veto_s=float(veto_s))
        self._send(SetLendingPolicy(words[0], lending))

    def _lend_part(self, words: Words) -> None:
        """`lend-part NODE FIRST..LAST`: loans of the node take these GPUs."""
        first, last = (int(n) for n in words[1].split(".."))
        self._send(ChangeNode(words[0], lendable_gpus=tuple(range(first, last + 1))))

    def _veto(self, words: Words) -> None:
        """`veto NODE REASON`: an administrator vetoes the proposed loan of the node."""
        loan = self._store.load().snapshot.loans[words[0]]
        self._send(VetoLoan(loan.id, words[1]), actor="ada")

    def _show_shadow(self, words: Words) -> None:
        snapshot, now_s = self._store.load().snapshot, self._clock.now_s()
        shadow, record = snapshot.shadows[words[0]], snapshot.demand[words[0]].shortages
        text = (
            f"{len(shadow.nodes)} nodes, {shadow.compute_gpu_s(now_s):.0f} GPU-s, {shadow.loans} loans, "
            f"{shadow.recalls} recalls, {record.short_intervals} of {record.intervals} intervals short"
        )
        self.output.append(f"{now_s:6.0f}  {'(shadow)':<20} {words[0]:<10} {text}")

    def _demand(self, words: Words) -> None:
        self._executor.set_demand(words[0], float(words[1]))
        self._send(ReportDemand(words[0], float(words[1])))

    def _forecast(self, words: Words) -> None:
        forecast = Forecast(self._clock.now_s(), 600.0, (0.999,), (float(words[1]),), "scripted")
        self._send(ForecastMade(words[0], forecast))

    def _submit(self, words: Words) -> None:
        least, most = (int(n) for n in words[1].split(".."))
        given = dict(word.split("=") for word in words[2:])
        spec = JobSpec(
            name=words[0],
            min_gpus=least,
            max_gpus=most,
            steps=int(given.get("gpu-seconds", "0")),
            queue=given.get("queue", "default"),
            priority=int(given.get("priority", "0")),
            deadline_s=float(given["deadline"]) if "deadline" in given else None,
            model=given.get("model", ""),
            global_batch=8 if "model" in given else 0,
            checkpoint=CheckpointSpec(interval_s=float(given.get("checkpoint-every", "900"))),
            on_resize=OnResize(given.get("on-resize", "checkpoint")),
        )
        self._send(SubmitJob(words[0], spec), actor=given.get("owner", ""))

    def _burst(self, words: Words) -> None:
        for number in range(int(words[0])):
            self._submit([f"burst-{number:03d}", *words[1:]])

    def _solve(self, words: Words) -> None:
        """`solve KEY GPUS [too-big | FIGURE=...]`: the solver returns a curve point. For the figures see `_plan`."""
        gpus = int(words[1])
        shape = GpuShape.packed(GPU, gpus, 4)
        if words[2:] == ["too-big"]:
            self._send(CurveSolved(words[0], shape, None, f"needs 94.1 GB of 80.0 GB per GPU on {gpus} GPUs"))
        else:
            self._send(CurveSolved(words[0], shape, _plan(gpus, dict(word.split("=") for word in words[2:]))))

    def _solve_mixed(self, words: Words) -> None:
        """`solve-mixed KEY GPUS MODEL=NODES STEP_S`: GPUS of the usual model beside NODES of 4 GPUs of another.

        With 0 GPUS, the shape has the other model alone.
        """
        gpus, (model, nodes) = int(words[1]), words[2].split("=")
        shape = GpuShape.from_node_counts([*[(GPU, 4)] * (gpus // 4), *[(model, 4)] * int(nodes)])
        counts = [(gpu, count) for gpu, count in ((GPU, gpus), (model, 4 * int(nodes))) if count]
        stages = tuple(
            PipelineStage(at, at, gpu, count, (LayerStrategy(1, dp=count),)) for at, (gpu, count) in enumerate(counts)
        )
        plan = replace(build_data_parallel_plan(GPU, shape.gpus), iteration_time_s=float(words[3]), stages=stages)
        self._send(CurveSolved(words[0], shape, plan))

    def _solve_tensor(self, words: Words) -> None:
        """`solve-tensor KEY GPUS DEGREE`: the solver returns a plan of 8 layers with this tensor-parallel degree.

        GPUs of several nodes are written `3+1`.
        """
        parts, degree = [int(part) for part in words[1].split("+")], int(words[2])
        shape, plan = (
            GpuShape.from_node_counts((GPU, part) for part in parts),
            build_data_parallel_plan(GPU, sum(parts)),
        )
        runs = (LayerStrategy(8, tp=degree, dp=shape.gpus // degree),)
        self._send(CurveSolved(words[0], shape, replace(plan, stages=(PipelineStage(0, 7, GPU, shape.gpus, runs),))))

    def _show_ranks(self, words: Words) -> None:
        snapshot = self._store.load().snapshot
        seats = snapshot.rank_placement(snapshot.jobs[words[0]].allocation)
        placement = ", ".join(f"{rank} on {node}[{gpu}]" for rank, (node, gpu) in enumerate(seats))
        self.output.append(f"{self._clock.now_s():6.0f}  {'(ranks)':<20} {words[0]:<10} {placement}")

    def _run_out_of_memory(self, words: Words) -> None:
        """`die-of-memory JOB GB`: the workers run out of memory at this peak use."""
        self._expect(self._executor.run_out_of_memory(words[0], peak_bytes=round(float(words[1]) * 1e9)))

    def _freeze(self, words: Words) -> None:
        """`freeze JOB LAYERS`: the workers report that the first layers are frozen."""
        job = self._store.load().snapshot.jobs[words[0]]
        steps = job.steps_at(self._clock.now_s())
        self._send(ReportProgress(job.id, job.allocation.generation, steps, frozen_layers=int(words[1])))

    def _expect(self, happened: bool) -> None:
        assert happened, "the scenario injects a fault into a run that does not exist"

    def _send(self, body: CommandBody, *, actor: str = "") -> None:
        self._sent += 1
        self._store.send(Command(f"golden-{self._sent}", self._clock.now_s(), body, actor))

    def _run(self, words: Words) -> None:
        until_s = self._clock.now_s() + float(words[0])
        wake_s = self._clock.now_s()
        while wake_s <= until_s:
            self._clock.move_to(wake_s)
            self._executor.advance_to(wake_s)
            wake_s = max(self._tick(), self._clock.now_s())
        self._clock.move_to(until_s)
        self._executor.advance_to(until_s)

    def _tick(self) -> float:
        report = tick(
            self._store, self._executor, self._clock, self._policies, epoch=self._epoch, active_breaches=self._breaches
        )
        self._on_report(report)
        self._breaches = report.breaches
        self._ticks += 1
        assert self._ticks < 5_000, "the scenario does not become stable"
        assert not report.violations, report.violations
        self.output.extend(_line(event) for event in report.events)
        if self._store.count_pending_commands():
            return self._clock.now_s()
        return min(report.next_wake_s, self._executor.next_event_s())


def _plan(gpus: int, given: Mapping[str, str]) -> ParallelPlan:
    """Return a data-parallel plan with optional figures.

    `peak=GB` is the predicted memory per GPU, `step=SECONDS` the step time and `zero=STAGE` the ZeRO stage. `pp=STAGES`
    splits 12 layers into equal stages.
    """
    plan = build_data_parallel_plan(GPU, gpus)
    step_s, peak_bytes = float(given.get("step", plan.iteration_time_s)), round(float(given.get("peak", "0")) * 1e9)
    plan = replace(plan, iteration_time_s=step_s, peak_bytes_per_gpu=peak_bytes)
    if "pp" in given:
        layers, width = 12 // int(given["pp"]), gpus // int(given["pp"])
        strategies = (LayerStrategy(layers=layers, dp=width),)
        stages = (PipelineStage(first, first + layers - 1, GPU, width, strategies) for first in range(0, 12, layers))
        return replace(plan, micro_batches=16 // width, stages=tuple(stages))
    if "zero" in given:
        strategies = (LayerStrategy(layers=1, dp=gpus, zero=int(given["zero"]), shard_group=gpus),)
        return replace(plan, stages=(PipelineStage(0, 0, GPU, gpus, strategies),))
    return plan


def _line(event: Event) -> str:
    return f"{event.at_s:6.0f}  {event.code:<20} {event.subject:<10} {event.message}"
