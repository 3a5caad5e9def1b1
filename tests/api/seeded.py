"""A service that holds some of everything, and can be put back to that state as often as wanted."""

from __future__ import annotations

from dataclasses import replace

from api.dependencies import Service
from scheduler.domain.worker_token import issue_agent_token, issue_token
from scheduler.store.memory import MemoryStore
from scheduler.store.protocol import Commit, Page
from tests.api.conftest import SECRET, ApiService


class SeededService:
    """Pools, nodes, loans, queues, and jobs that run, wait, are suspended and have ended. `known`: names that path
    parameters may take. `authorization`: headers of whoever may do everything."""

    def __init__(self) -> None:
        self.service = made = ApiService()
        self.authorization: dict[str, str] = {}
        made.made("/v1/pools", {"name": "training", "kind": "training"})
        made.made("/v1/pools", {"name": "empty", "kind": "training"})
        made.made("/v1/pools", {"name": "inference", "kind": "inference", "lending": {"headroom": 0.0}})
        for name, pool in (("t0", "training"), ("t1", "training"), ("i0", "inference"), ("i1", "inference")):
            made.made("/v1/nodes", {"name": name, "pool": pool, "gpu": "cpu", "gpus": 2})
        made.made("/v1/queues", {"name": "blue", "guaranteed_gpus": 1})
        self.running = made.submit("running", gpus={"min": 2, "max": 2}, queue="blue")
        asleep, gone = made.submit("asleep"), made.submit("gone")
        made.post(f"/v1/jobs/{asleep}:suspend")
        made.http.delete(f"/v1/jobs/{gone}")
        made.lend_all()
        waiting = made.submit("waiting", gpus={"min": 64, "max": 64})
        made.tick()
        made.made("/v1/nodes", {"name": "spare", "pool": "training", "gpu": "cpu", "gpus": 1})
        made.http.post("/v1/nodes/spare:cordon")
        made.tick()
        self.generation = made.store.load().snapshot.jobs[self.running].allocation.generation
        self.known = {
            "job_id": [self.running, asleep, gone, waiting],
            "name": ["inference", "empty", "spare", "t0", "blue", "default"],
            "node": ["t0"],
        }
        self._seed = made.store.load().snapshot, made.store.ended_jobs(limit=99), made.store.events(Page(limit=99))

    def put_back(self) -> None:
        """Give the application a store as it was first."""
        snapshot, ended, events = self._seed
        before = replace(snapshot, generation=snapshot.generation - 1)
        store = MemoryStore(before)
        told = tuple(each.event for each in events)
        store.commit(Commit(before, snapshot, epoch=0, ended_jobs=ended, events=told))
        service = self.service.app.state.service
        assert isinstance(service, Service)
        self.service.app.state.service = replace(
            service, store=store, agents=type(service.agents)(store, self.service.run_log)
        )

    def headers(self, operation_id: str) -> dict[str, str]:
        """What lets the one pass who is meant to ask this."""
        match operation_id:
            case "report_job_progress":
                token = issue_token(SECRET, self.running, self.generation)
            case "report_agent":
                token = issue_agent_token(SECRET, self.running)
            case _:
                return self.authorization
        return {"Authorization": f"Bearer {token}"}
