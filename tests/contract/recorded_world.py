"""The recorded contract: documents that every version must read and reproduce.

`python -m tests.contract.recorded_world` records them anew from the current code. Do so only together with a line in
CHANGELOG.md, and for the database with a migration.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.http.errors import TITLES
from cli.exit_codes import ExitCode
from scheduler.domain.codec import encode, union_members
from scheduler.domain.commands import Command, CommandBody
from scheduler.domain.decisions import Decision, ReasonCode
from scheduler.domain.events import EventCode
from scheduler.domain.worker_token import issue_agent_token, issue_worker_token
from scheduler.executors.reported_runs import build_begun_run
from scheduler.runtime.clock import ManualClock
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.settings import Settings
from scheduler.solver.curve import build_curve_solved, solve_point
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.api.conftest import SECRET, ApiService, AppTransport
from tests.api.seeded_service import SeededService

FOLDER = Path(__file__).parent / "recorded"
ROOT = Path(__file__).resolve().parents[2]
PROSE = frozenset(
    {"description", "detail", "examples", "example", "hint", "message", "summary", "title", "why", "text", "unblocks"}
)
"""Keys whose values are sentences: they may be rewritten, as long as they stay strings."""
STATEMENTS: tuple[dict[str, Any], ...] = (
    {"pod": "p1", "address": "10.1.0.2"},
    {"pod": "p1", "address": "10.1.0.2", "runs": [{"generation": 0, "prepared": 1, "master_port": 29500}]},
    {
        "pod": "p1",
        "address": "10.1.0.2",
        "runs": [
            {"generation": 1, "ranks": [{"rank": 0, "status": {"phase": "running", "step": 3}, "written_at_ns": 5}]}
        ],
    },
    {"pod": "p2", "address": "10.1.0.3"},
)
PLAN_REQUEST = {"model": "gpt2", "gpu": "a100-80g", "gpus": 8, "globalBatch": 64}


def record() -> None:
    """Write every document of the contract from the current code."""
    with TemporaryDirectory() as folder:
        seeded = SeededService(Path(folder))
        path = Path(folder) / "seed.sqlite"
        names = _furnish(seeded, path)
        (FOLDER / "database.sql").write_text(dump(path), encoding="utf-8")
    _write("world", names)
    with TemporaryDirectory() as folder:
        replayed = Replay(Path(folder))
        _write("snapshot", encode(replayed.store.load().snapshot))
        _write("rest", replayed.answers())
        _write("metrics", replayed.metrics())
        _write("agent", replayed.agent_conversation())
        _write("plan", replayed.plan())
    _write("openapi", openapi_shape())
    _write("resources", resource_definitions())
    _write("codes", codes())


def _furnish(seeded: SeededService, path: Path) -> dict[str, Any]:
    """Add a solved curve, progress, and a begun run to the seeded database; return what a replay must know."""
    store = SqlStore(f"sqlite:///{path}")
    service = ApiService(Settings(auth="off", allowed_hosts="service"), store)
    service.executor = seeded.service.executor
    service.clock.move_to(seeded.service.clock.now_s())
    service.made("/v1/nodes", {"name": "a0", "pool": "training", "gpu": "a100-80g", "gpus": 8})
    planned = service.submit("planned", model="gpt2", globalBatch=64, gpus={"min": 2, "max": 8})
    service.tick(learned=_learn_curve(service))
    service.tick()
    token = {"Authorization": f"Bearer {issue_worker_token(SECRET, seeded.running, seeded.generation)}"}
    report = {"generation": seeded.generation, "step": 40, "loss": 2.5, "samples_per_s": 12.0}
    response = service.http.post(f"/v1/jobs/{seeded.running}/progress", json=report, headers=token)
    assert response.status_code == 200, response.text
    service.tick()
    snapshot = store.load().snapshot
    job = snapshot.jobs[planned]
    agents = {(planned, node): "p1" for node in job.allocation.target}
    assert service.leader is not None
    assert store.run_log.begin_run(
        build_begun_run(job, snapshot.rank_placement(job.allocation), agents, service.clock.now_s()),
        epoch=service.leader.epoch,
    )
    store.close()
    return {"now_s": service.clock.now_s(), "running": seeded.running, "planned": planned, "known": seeded.known}


def _learn_curve(service: ApiService) -> tuple[Command, ...]:
    report = service.tick()
    requests = service.store.load().snapshot.curve_requests()
    return tuple(
        Command(f"curve-{at}", service.clock.now_s(), build_curve_solved(wanted.curve_key, wanted.shape, point))
        for at, wanted in enumerate(report.wanted_shapes)
        for point in [solve_point(requests[wanted.curve_key], wanted.shape)]
    )


def dump(path: Path) -> str:
    """Return the database as SQL, one statement a line."""
    with sqlite3.connect(path) as connection:
        return "\n".join(connection.iterdump()) + "\n"


def read(name: str) -> Any:
    """Return the recorded document `name`."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _write(name: str, document: Any) -> None:
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


class Replay:
    """The current application on a migrated copy of the recorded database, at the recorded time."""

    def __init__(self, folder: Path) -> None:
        self.world = read("world")
        path = folder / "recorded.sqlite"
        with sqlite3.connect(path) as connection:
            connection.executescript((FOLDER / "database.sql").read_text(encoding="utf-8"))
        self.path = path
        migrate(f"sqlite:///{path}")
        self.store = SqlStore(f"sqlite:///{path}")
        app = create_app(
            self.store,
            Settings(auth="off", allowed_hosts="service"),
            clock=ManualClock(self.world["now_s"]),
            policies=load_policy_set("ebbtide"),
            lease=self.store.get_lease,
            token_secret=SECRET,
            run_log=self.store.run_log,
        )
        self.http = httpx.Client(transport=AppTransport(app), base_url="http://service")

    def answers(self) -> dict[str, Any]:
        """Return status and JSON of each GET route, by path, without its prose."""
        return {path: self._answer(path) for path in self._paths()}

    def _answer(self, path: str) -> dict[str, Any]:
        response = self.http.get(path)
        return {"status": response.status_code, "body": without_prose(response.json())}

    def _paths(self) -> Iterator[str]:
        """The GET routes of the recorded OpenAPI document, once for each known value of their parameter."""
        known = {**self.world["known"], "job_id": [*self.world["known"]["job_id"], self.world["planned"]]}
        for path, operations in sorted(read_openapi()["paths"].items()):
            if "get" not in operations or path in ("/metrics",):
                continue
            names = re.findall(r"{(\w+)}", path)
            if len(names) > 1:
                continue
            for value in known.get(names[0], []) if names else [""]:
                yield path.replace(f"{{{names[0]}}}", value) if names else path

    def metrics(self) -> dict[str, Any]:
        """Return each metric family's type and label sets, and for gauges of the fleet the values too."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            family.name: {
                "type": family.type,
                "labels": sorted({",".join(sorted(sample.labels)) for sample in family.samples}),
            }
            for family in families
            if family.name.startswith("ebbtide_")
        }

    def agent_conversation(self) -> list[Any]:
        """Return what an agent of the planned job says, and the reply to each, with its secrets masked."""
        job_id = self.world["planned"]
        headers = {"Authorization": f"Bearer {issue_agent_token(SECRET, job_id)}"}
        conversation = []
        for statement in STATEMENTS:
            runs = [{"job_id": job_id, "node": "a0", **run} for run in statement.get("runs", ())]
            report = {**statement, "runs": runs}
            response = self.http.post(f"/v1/jobs/{job_id}/agents/a0", json=report, headers=headers)
            reply = re.sub(r'("token": ")[^"]+', r"\1***", json.dumps(response.json()))
            conversation.append({"says": statement, "status": response.status_code, "reply": json.loads(reply)})
        return conversation

    def plan(self) -> Any:
        """Return the answer to a plan request, without its prose and durations."""
        response = self.http.post("/v1/plans", json=PLAN_REQUEST)
        assert response.status_code == 200, response.text
        return without_prose({key: value for key, value in response.json().items() if key != "search_time_s"})


def without_prose(document: Any) -> Any:
    """Return `document` with every sentence replaced by its type, since sentences may be rewritten."""
    if isinstance(document, Mapping):
        return {
            key: "(text)" if key in PROSE and isinstance(value, str) else without_prose(value)
            for key, value in document.items()
        }
    return [without_prose(item) for item in document] if isinstance(document, list) else document


def read_openapi() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "api" / "openapi.json").read_text(encoding="utf-8"))
    return document


def openapi_shape() -> Any:
    """Return operations and schemas of the committed OpenAPI document without its prose.

    Schemas are numbered in the order in which operations refer to them, since their names follow Python classes.
    """
    document = read_openapi()
    numbers: dict[str, str] = {}

    def shape(node: Any) -> Any:
        if isinstance(node, list):
            return [shape(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            return {"schema": numbers.setdefault(name, f"schema-{len(numbers)}")}
        kept = {
            key: shape(value) for key, value in sorted(node.items()) if key not in (*PROSE, "properties", "mapping")
        }
        if isinstance(properties := node.get("properties"), dict):
            kept["properties"] = {key: shape(value) for key, value in sorted(properties.items())}
        return kept

    operations = {
        f"{method.upper()} {path}": shape(operation)
        for path, methods in sorted(document["paths"].items())
        for method, operation in sorted(methods.items())
    }
    schemas: dict[str, Any] = {}
    while len(schemas) < len(numbers):
        for name, number in list(numbers.items()):
            schemas.setdefault(number, shape(document["components"]["schemas"][name]))
    return {"operations": operations, "schemas": schemas}


def resource_definitions() -> Any:
    """Return the custom resource definitions by name, without their prose."""
    folder = ROOT / "helm" / "ebbtide" / "crd-bases"
    definitions = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))]
    return {each["metadata"]["name"]: _without_descriptions(each) for each in definitions}


def _without_descriptions(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: _without_descriptions(value)
            for key, value in node.items()
            if not (key in ("description", "message") and isinstance(value, str))
        }
    return [_without_descriptions(item) for item in node] if isinstance(node, list) else node


def codes() -> dict[str, Any]:
    """Return every code that clients may compare: events, reasons, problems, commands and decisions."""
    return {
        "events": sorted(EventCode),
        "reasons": sorted(ReasonCode),
        "problems": sorted(TITLES),
        "commands": sorted(union_members(CommandBody)),
        "decisions": sorted(union_members(Decision)),
        "exit_codes": {code.label: int(code) for code in ExitCode},
        "operations": sorted(
            operation["operationId"] for methods in read_openapi()["paths"].values() for operation in methods.values()
        ),
    }


def print_metrics() -> None:
    """Print the metric families of a fresh process, because other tests of a process add samples to its registry."""
    with TemporaryDirectory() as folder:
        replayed = Replay(Path(folder))
        replayed.answers()
        print(json.dumps(replayed.metrics()))
        replayed.store.close()


if __name__ == "__main__":
    print_metrics() if sys.argv[1:] == ["metrics"] else record()
