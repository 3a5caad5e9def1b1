"""Composition of the demo's controller: one tick over this machine and the simulated nodes."""

from __future__ import annotations

from cli.composition.service import assemble_controller, make_holder_id, start_clock
from cli.demo.simulated_fleet import build_simulation, list_nodes
from scheduler.executors.agent_executor import AgentExecutor
from scheduler.executors.composite_executor import CompositeExecutor, ExecutorPart
from scheduler.executors.run_ledger import RunLedger
from scheduler.runtime.controller import Controller
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore


def build_demo_controller(settings: Settings, store: SqlStore) -> Controller:
    """Build a controller whose jobs run on machines with node agents or on the simulated nodes, without starting it."""
    clock = start_clock(store)
    simulated_names = {node.name for node in list_nodes()}
    ledger = RunLedger(store.run_log, epoch=lambda: controller.epoch)
    agents = AgentExecutor(ledger, store.machines, now=clock.now_s, disconnect_s=settings.disconnect_s)
    simulation = build_simulation(now=clock.now_s, record_contact=store.machines.record_seen)
    executor = CompositeExecutor(
        [
            ExecutorPart(agents, lambda node: node.name not in simulated_names),
            ExecutorPart(simulation, lambda node: node.name in simulated_names),
        ]
    )
    controller = assemble_controller(
        settings,
        store,
        executor,
        clock,
        holder=make_holder_id(),
        has_news=lambda: agents.has_pending_changes() or simulation.has_pending_changes(),
    )
    return controller
