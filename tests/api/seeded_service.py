"""A service with some of everything, which can be reset to that state."""

from __future__ import annotations

import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from api.decision_watch import DecisionWatch
from api.http.dependencies import Service
from api.openapi import load_examples
from api.state import StateReader
from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.worker_token import issue_agent_token, issue_worker_token
from scheduler.package_version import get_package_version
from scheduler.store.protocol import Commit
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import SECRET


class SeededService:
    """Pools, nodes, loans, queues, a webhook, a simulation, and jobs that run, wait, are suspended and have ended.
    `known`: names that path parameters may take. `authorization`: headers of whoever may do everything."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seed, self._number = folder, folder / "seed.sqlite", 0
        migrate(f"sqlite:///{self._seed}")
        store = SqlStore(f"sqlite:///{self._seed}")
        self.service = made = AuthenticatedService(
            store,
            rate_per_s=1e6,
            rate_burst=1_000_000,
            webhook_hosts="hooks.example.com",
            archive_dir=folder / "archives",
            run_dir=folder / "run",
        )
        self.authorization = {"Authorization": f"Bearer {made.root}"}
        made.http.headers.update(self.authorization)
        made.made("/v1/pools", {"name": "training", "kind": "training"})
        made.made("/v1/pools", {"name": "empty", "kind": "inference"})
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
            "name": ["m0", "inference", "empty", "spare", "t0", "blue", "default"],
            "node": ["t0"],
            "generation": [str(self.generation)],
            "rank": ["0"],
            "token_id": [made.made("/v1/tokens", {"name": "ci", "grants": ["viewer"]})["id"]],
            "secret_name": [self._set_secret("hf-token")],
            "gpu": [self._describe_hardware()],
            "digest": [self._upload(b"archive")],
            "loan_id": [self._propose_loan(store)],
            **self._background(),
            **self._machines(),
        }
        del made.http.headers["Authorization"]
        store.close()
        self._store = SqlStore(f"sqlite:///{self._seed}")

    def list_names(self, path: str, parameter: str) -> list[str]:
        """Return what a parameter of a path template may be; for `name`, the names in its collection."""
        by_collection = {
            "pools": ["inference", "empty"],
            "nodes": ["spare", "t0"],
            "queues": ["blue"],
            "machines": ["m0"],
        }
        known = self.known[parameter]
        return by_collection.get(path.split("/")[2], known) if parameter == "name" else known

    def _propose_loan(self, store: SqlStore) -> str:
        """Commit the proposal of a loan whose notice is long."""
        made = self.service
        made.made("/v1/nodes", {"name": "i2", "pool": "inference", "gpu": "cpu", "gpus": 2})
        made.tick()
        assert made.leader is not None
        before, now_s = store.load().snapshot, made.clock.now_s()
        loan = Loan("i2-1", "i2", "inference", LoanState.PROPOSED, now_s + 1e6, now_s, proposed_at_s=now_s)
        after = replace(before, generation=before.generation + 1, loans={**before.loans, "i2": loan})
        store.commit(Commit(before, after, made.leader.epoch))
        return loan.id

    def _set_secret(self, name: str) -> str:
        answer = self.service.http.put(f"/v1/queues/blue/secrets/{name}", content=b"a seeded value")
        assert answer.status_code == 200, answer.text
        return name

    def _describe_hardware(self) -> str:
        """Set the profile of a GPU model and the networks of two pools. Return the GPU model."""
        profile, network = load_examples()["GpuProfileDocument"], load_examples()["PoolNetworkDocument"]
        gpu = str(profile["gpu"])
        paths = {f"/v1/hardware/gpus/{gpu}": {**profile, "efficiency": 0.6}}
        paths |= {f"/v1/pools/{pool}/network": network for pool in ("inference", "empty")}
        for path, document in paths.items():
            answer = self.service.http.put(path, json=document)
            assert answer.status_code == 202, answer.text
        self.service.tick()
        return gpu

    def _upload(self, archive: bytes) -> str:
        digest = f"sha256:{sha256(archive).hexdigest()}"
        assert self.service.http.put(f"/v1/archives/{digest}", content=archive).status_code == 201
        return digest

    def _background(self) -> dict[str, list[str]]:
        made = self.service
        webhook = made.made("/v1/webhooks", {"url": "https://hooks.example.com/ebbtide"})["id"]
        delivery = made.made(f"/v1/webhooks/{webhook}:test")["id"]
        simulation = made.made("/v1/simulations", load_examples()["SimulationDocument"])["id"]
        return {"webhook_id": [webhook], "delivery_id": [delivery], "simulation_id": [simulation]}

    def _machines(self) -> dict[str, list[str]]:
        """Let a machine join, and keep a token with which others can."""
        made = self.service
        token = made.made("/v1/machines/tokens", {"pool": "training", "uses": 2})
        self.join_token = token["secret"]
        document = {**load_examples()["JoinDocument"], "name": "m0", "version": get_package_version()}
        answer = made.post("/v1/machines:join", {**document, "clock_s": made.clock.now_s()}, token=self.join_token)
        self.credential = answer.json()["credential"]
        return {"machine": ["m0"], "join_token_id": [token["id"]]}

    @property
    def path(self) -> Path:
        """The file of the current copy of the store."""
        return self._folder / f"{self._number}.sqlite"

    def reset(self) -> None:
        """Give the application a copy of the original store."""
        self._store.close()
        self._number += 1
        shutil.copyfile(self._seed, self.path)
        self._store = store = SqlStore(f"sqlite:///{self.path}")
        service = self.service.app.state.service
        assert isinstance(service, Service)
        agents = type(service.agent_state)(store, self.service.run_log)
        self.service.app.state.service = replace(
            service,
            store=store,
            agent_state=agents,
            decision_watch=DecisionWatch(agents, service.clock),
            state_reader=StateReader(store),
        )
        (self._folder / f"{self._number - 1}.sqlite").unlink(missing_ok=True)

    def headers(self, operation_id: str) -> dict[str, str]:
        """Return the credentials that the operation needs."""
        match operation_id:
            case "report_job_progress":
                token = issue_worker_token(SECRET, self.running, self.generation)
            case "report_agent":
                token = issue_agent_token(SECRET, self.running)
            case "report_machine" | "store_rank_output" | "update_machine_facts" | "leave_machine":
                token = self.credential
            case "join_machine":
                token = self.join_token
            case _:
                return self.authorization
        return {"Authorization": f"Bearer {token}"}
