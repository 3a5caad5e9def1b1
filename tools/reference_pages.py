"""The reference section of the documentation, generated from the code.

`python -m tools.reference_pages` writes `docs/reference/*.md`. `make docs` calls it, so the pages are never committed.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

import ebbtide
from api.http.errors import TITLES, TYPE_PREFIX
from cli.app import SUBCOMMANDS, load_command
from cli.exit_codes import MEANINGS
from scheduler.documents.job import JobDocument
from scheduler.domain.snapshot import Snapshot
from scheduler.settings import Settings
from scheduler.telemetry import metrics
from scheduler.telemetry.exposition import TracedHistogram
from scheduler.telemetry.fleet_gauges import FleetGauges
from scheduler.telemetry.metrics import REGISTRY
from tools.grafana_boards.boards import BOARDS
from tools.grafana_boards.panels import Board, Kind

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "ebbtide"
TARGET = ROOT / "docs" / "reference"
Schema = Mapping[str, Any]
_LINK = re.compile(r"\[\w+\]\(#\w+\)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented thing: a setting, an option, a field, a metric. `subject` says where it stands, for tests."""

    subject: str
    name: str
    description: str


def build_pages() -> dict[str, str]:
    """Return the Markdown of every reference page by file name."""
    return {
        "cli.md": _render_command_line(),
        "settings.md": _render_settings(),
        "rest.md": _render_rest(),
        "job-document.md": _render_job_document(),
        "training-library.md": _render_training_library(),
        "custom-resources.md": _render_custom_resources(),
        "metrics.md": _render_metrics(),
        "alerts.md": _render_alerts(),
        "dashboards.md": _render_dashboards(),
        "problem-types.md": _render_problem_types(),
    }


def list_entries() -> Iterator[Entry]:
    """Yield everything that a description is required of."""
    yield from _option_entries()
    yield from _setting_entries()
    yield from _rest_entries()
    yield from (Entry("session", call, meaning) for call, meaning in _session_members())
    yield from (Entry("metric", metric.name, metric.documentation) for metric in _metrics())
    for definition in _custom_resources():
        kind = definition["spec"]["names"]["kind"]
        for path, schema in _resource_fields(definition):
            yield Entry(kind, path, schema.get("description", ""))


def _page(title: str, introduction: str, *sections: str) -> str:
    return "\n\n".join([f"# {title}", introduction, *sections]) + "\n"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [names, ["---"] * len(names), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _code(value: object) -> str:
    return f"`{value}`" if value not in ("", None) else ""


# Command line


def _render_command_line() -> str:
    sections = [_render_command(path, command) for path, command in _commands()]
    introduction = "Every command prints a table, or with `-o json` and `-o yaml` a document for scripts."
    return _page("Command line", introduction, _render_exit_codes(), *sections)


def _render_exit_codes() -> str:
    rows = ((str(int(code)), _code(code.label), meaning) for code, meaning in MEANINGS.items())
    return "\n\n".join(
        (
            "## Exit codes",
            _table(("Exit code", "Name", "Meaning"), rows),
            "These codes are stable. An error is one message on stderr. With `-o json`, the last line of stderr is a "
            "JSON object. It has `status`, `type` and `errors` if the service answered:",
            '```json\n{"error": {"code": "not-found", "exit_code": 4, "message": "job ghost does not exist", "status": '
            '404, "type": "urn:ebbtide:problem:not-found", "errors": []}}\n```',
        )
    )


def _commands() -> Iterator[tuple[str, Any]]:
    """Yield every visible command with its full name, those of a group after the group."""
    for subcommand in SUBCOMMANDS:
        if subcommand.hidden:
            continue
        command = load_command(subcommand)
        yield f"ebbtide {subcommand.name}", command
        for name, child in sorted(getattr(command, "commands", {}).items()):
            if not child.hidden:
                yield f"ebbtide {subcommand.name} {name}", child


def _render_command(path: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    usage = " ".join([path, *(param.metavar or param.name.upper() for param in arguments), "[OPTIONS]"])
    parts = [f"## {path}", command.help or "", f"```text\n{usage}\n```"]
    if options:
        rows = ((_code(", ".join(option.opts)), option.help or "", _code(_default_of(option))) for option in options)
        parts.append(_table(("Option", "Meaning", "Default"), rows))
    return "\n\n".join(part for part in parts if part)


def _option_entries() -> Iterator[Entry]:
    for path, command in _commands():
        for param in command.params:
            if param.param_type_name == "option" and not param.hidden:
                yield Entry(path, param.opts[-1], param.help or "")


def _default_of(option: Any) -> object:
    default = option.default
    return "" if default is None or callable(default) or default in (False, ()) else getattr(default, "value", default)


# Settings


def _render_settings() -> str:
    rows = (
        (_code(f"EBBTIDE_{name.upper()}"), field.description or "", _code(_shown_default(field.default)))
        for name, field in Settings.model_fields.items()
    )
    introduction = "The service reads its settings from environment variables when it starts."
    return _page("Settings", introduction, _table(("Variable", "Meaning", "Default"), rows))


def _shown_default(default: object) -> str:
    return "" if default is None else str(default)


def _setting_entries() -> Iterator[Entry]:
    for name, field in Settings.model_fields.items():
        yield Entry("setting", f"EBBTIDE_{name.upper()}", field.description or "")


# REST


def _read_openapi() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "api" / "openapi.json").read_text(encoding="utf-8"))
    return document


def _operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in sorted(document["paths"].items()):
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _render_rest() -> str:
    document = _read_openapi()
    operations = sorted(_operations(document), key=lambda item: (item[2]["tags"][0], item[1]))
    sections = [
        "\n\n".join([f"## {tag.capitalize()}", *(_render_operation(*item, document) for item in members)])
        for tag, members in groupby(operations, key=lambda item: item[2]["tags"][0])
    ]
    introduction = (
        "The service serves this description as OpenAPI 3.1 at `/openapi.json`. Errors are "
        "[problem documents](problem-types.md)."
    )
    schemas = document["components"]["schemas"]
    described = [_render_schema(name, schema, schemas) for name, schema in sorted(schemas.items())]
    return _page("REST API", introduction, *sections, "## Schemas", *described)


def _render_operation(method: str, path: str, operation: Schema, document: Schema) -> str:
    parts = [f"### {method} {path}", operation.get("description", "")]
    if parameters := operation.get("parameters"):
        rows = ((_code(each["name"]), each["in"], each.get("description", "")) for each in parameters)
        parts.append(_table(("Parameter", "In", "Meaning"), rows))
    if body := operation.get("requestBody"):
        parts.append(f"Body: {_content_of(body)}")
    answers = (
        (status, _content_of(answer), answer["description"]) for status, answer in operation["responses"].items()
    )
    parts.append(_table(("Status", "Body", "Meaning"), answers))
    return "\n\n".join(part for part in parts if part)


def _content_of(holder: Schema) -> str:
    schemas = (content.get("schema", {}) for content in holder.get("content", {}).values())
    return ", ".join(dict.fromkeys(_type_of(schema) for schema in schemas))


def _type_of(schema: Schema) -> str:
    """Return a schema's type in Markdown; a reference becomes a link."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{_anchor(name)})"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(_type_of(each) for each in schema.get("anyOf", schema.get("oneOf", ())))
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if isinstance(extra := schema.get("additionalProperties"), dict):
        return f"map of {_type_of(extra)}"
    kind = schema.get("type", "")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _render_schema(name: str, schema: Schema, schemas: Schema) -> str:
    required = set(schema.get("required", ()))
    rows = (
        (_code(field), _type_of(each), "yes" if field in required else "", _describe(each, schemas))
        for field, each in schema.get("properties", {}).items()
    )
    table = _table(("Field", "Type", "Required", "Meaning"), rows) if schema.get("properties") else ""
    return "\n\n".join(part for part in (f"### {name}", schema.get("description", ""), table) if part)


def _describe(schema: Schema, schemas: Schema) -> str:
    """Return a field's own description, or that of the schema it refers to."""
    own: str = schema.get("description", "")
    name = schema.get("$ref", "").rpartition("/")[2]
    return own or str(schemas.get(name, {}).get("description", "")).partition("\n\n")[0]


def _rest_entries() -> Iterator[Entry]:
    document = _read_openapi()
    schemas = document["components"]["schemas"]
    for method, path, operation in _operations(document):
        yield Entry("route", f"{method} {path}", operation.get("description", ""))
        for parameter in operation.get("parameters", ()):
            yield Entry(f"{method} {path}", parameter["name"], parameter.get("description", ""))
    for name, schema in schemas.items():
        for field, each in schema.get("properties", {}).items():
            yield Entry(name, field, _describe(each, schemas))


# Documents and custom resources


def _render_job_document() -> str:
    schema = JobDocument.model_json_schema(by_alias=True)
    rows = (
        (_code(path), _LINK.sub("object", _type_of(each)), each.get("description", ""))
        for path, each in _fields(schema, schema.get("$defs", {}))
    )
    introduction = (
        "The body of `POST /v1/jobs`, the file of `ebbtide submit --file`, and a job in a simulated workload."
    )
    return _page("Job document", introduction, _table(("Field", "Type", "Meaning"), rows))


def _custom_resources() -> list[dict[str, Any]]:
    documents = (
        yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((CHART / "crd-bases").glob("*.yaml"))
    )
    return [document for document in documents if document.get("kind") == "CustomResourceDefinition"]


def _resource_schema(definition: Schema) -> Schema:
    schema: Schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _resource_fields(definition: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the fields of a custom resource. The API server rejects a definition that describes `metadata`."""
    described = {"metadata": {"description": "Name, labels and annotations, as of every Kubernetes object."}}
    for path, each in _fields(_resource_schema(definition), {}):
        yield path, {**each, **described.get(path, {})}


def _render_custom_resources() -> str:
    sections = []
    for definition in _custom_resources():
        schema = _resource_schema(definition)
        fields = _resource_fields(definition)
        rows = ((_code(path), _type_of(each), each.get("description", "")) for path, each in fields)
        table = _table(("Field", "Type", "Meaning"), rows)
        sections.append(f"## {definition['spec']['names']['kind']}\n\n{schema.get('description', '')}\n\n{table}")
    return _page("Custom resources", "The operator owns these kinds of the group `ebbtide.dev`.", *sections)


def _fields(schema: Schema, definitions: Schema, above: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield each field of an object schema with its path, those of nested objects and lists after it."""
    for name, each in schema.get("properties", {}).items():
        path = f"{above}.{name}" if above else name
        yield path, each
        yield from _fields(_object_in(each, definitions), definitions, f"{path}[]" if "items" in each else path)


def _object_in(schema: Schema, definitions: Schema) -> Schema:
    for each in (schema, *schema.get("anyOf", ()), schema.get("items", {})):
        if "$ref" in each:
            found: Schema = definitions.get(each["$ref"].rpartition("/")[2], {})
            return found
        if "properties" in each:
            inner: Schema = each
            return inner
    return {}


# Training library


def _session_members() -> Iterator[tuple[str, str]]:
    """Yield each public property and method of the session as it is written, with the first part of its docstring."""
    for name, member in vars(ebbtide.Session).items():
        if name.startswith("_"):
            continue
        function = getattr(member, "__func__", member)
        call = name if isinstance(member, property) else f"{name}({', '.join(_parameters(function))})"
        yield call, re.split(r"\n\n(?:Args|Raises):", inspect.getdoc(member) or "")[0]


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default}"
        yield f"{parameter.name}{default}"


def _render_training_library() -> str:
    rows = ((_code(call), meaning) for call, meaning in _session_members())
    introduction = (
        "`import ebbtide` gives a training script its `Session`. The library needs Python 3.10 or later. Install it "
        "into the environment of your script: `pip install ebbtide`. "
        "[Your own script](../tutorials/your-own-script.md) shows how the calls work together."
    )
    return _page("Training library", introduction, "## ebbtide.Session", _table(("Member", "Meaning"), rows))


# Metrics, alerts, problem types


def _metrics() -> list[Metric]:
    gauges = FleetGauges(Snapshot(), has_leader=True, inbox_size=0, by_job=True)
    found = {metric.name: metric for collector in (REGISTRY, gauges) for metric in collector.collect()}
    return [found[name] for name in sorted(found)]


def _labels_by_metric() -> dict[str, tuple[str, ...]]:
    """Return label names by metric. The library keeps them in private attributes of metrics and families alone."""
    declared = {each._name: each._labelnames for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)}
    declared |= {each.name: each.labels for each in vars(metrics).values() if isinstance(each, TracedHistogram)}
    families = FleetGauges(Snapshot(), has_leader=True, inbox_size=0, by_job=True).collect()
    return declared | {family.name: tuple(family._labelnames) for family in families if hasattr(family, "_labelnames")}


def _render_metrics() -> str:
    labels = _labels_by_metric()
    rows = (
        (_code(_exposed_name(each)), each.type, ", ".join(map(_code, labels.get(each.name, ()))), each.documentation)
        for each in _metrics()
    )
    introduction = (
        "Served at `/metrics` by the API and by the operator, in the Prometheus text format or as OpenMetrics. The "
        "client chooses by `Accept`. OpenMetrics has exemplars: traces of recent observations. `EBBTIDE_CLUSTER` adds "
        "the label `cluster` to all."
    )
    return _page("Metrics", introduction, _table(("Metric", "Type", "Labels", "Meaning"), rows))


def _exposed_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _render_alerts() -> str:
    groups = yaml.safe_load((CHART / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    by_name: dict[str, list[Schema]] = {}
    for rule in rules:
        if "alert" in rule:
            by_name.setdefault(rule["alert"], []).append(rule)
    introduction = (
        "The chart installs these rules. The [runbook](../how-to/runbook.md) says what to do for each. `critical`: "
        "inference is short, a promise is broken, or nothing is decided, so act at once. `warning`: look at it during "
        "working hours."
    )
    recorded = [rule for rule in rules if rule.get("record") == "ebbtide:slo_error:ratio_rate1h"]
    goals = _table(("SLO", "Objective"), ((_code(slo), goal) for slo, goal in _OBJECTIVES.items()))
    ratios = (_render_ratio(rule) for rule in recorded)
    overview = _table(
        ("Alert", "Severity", "Pending for", "Meaning"),
        ((f"[{name}](#{name.lower()})", *_alert_facts(alerts)) for name, alerts in by_name.items()),
    )
    sections = (_render_alert(name, alerts) for name, alerts in by_name.items())
    return _page("Alerts", introduction, "## Objectives", goals, *ratios, "## Overview", overview, *sections)


_OBJECTIVES = {
    "recalls-in-time": "99.9% of the recalled nodes are home by their deadline",
    "inference-met": "loans leave a pool short in at most 0.1% of five-minute intervals",
    "goodput": "at least 90% of the allocated GPU time is useful training",
    "queue-wait": "95% of the jobs start within an hour; `queueWaitSeconds` of the chart changes it",
}


def _render_ratio(rule: Schema) -> str:
    return f"Errors of {_code(rule['labels']['slo'])} in an hour:\n\n```promql\n{rule['expr'].strip()}\n```"


def _alert_facts(alerts: Iterable[Schema]) -> tuple[str, str, str]:
    """Return severities, times before it fires, and the meaning of an alert with one rule or several."""
    severities = dict.fromkeys(alert["labels"]["severity"] for alert in alerts)
    pending = dict.fromkeys(alert.get("for", "0m") for alert in alerts)
    summary = next(alert["annotations"]["summary"] for alert in alerts)
    return ", ".join(severities), ", ".join(pending), re.sub(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}", r"`\1`", summary)


def _render_alert(name: str, alerts: Iterable[Schema]) -> str:
    parts = [f"## {name}"]
    for alert in alerts:
        window = alert["labels"].get("window")
        facts = f"Severity: {alert['labels']['severity']}. Pending for: {alert.get('for', '0m')}."
        facts += f" Window: {window}." if window else ""
        parts += [facts, f"```promql\n{alert['expr'].strip()}\n```"]
    return "\n\n".join(parts)


def _render_dashboards() -> str:
    sections = [f"## {board.title}\n\n{board.about}\n\n{_panel_table(board)}" for board in BOARDS]
    introduction = (
        "The chart installs these Grafana dashboards. `ebbtide assets export` writes them to a folder. Each shows one "
        "installation, by the variables `cluster` and `namespace`."
    )
    return _page("Dashboards", introduction, count_panels(), *sections)


def count_panels() -> str:
    """Return a table of the number of panels by dashboard and type."""
    rows = (
        (board.title, *(str(sum(panel.kind is kind for panel in board.panels) or "") for kind in Kind))
        for board in BOARDS
    )
    return _table(("Dashboard", *(kind.value for kind in Kind)), rows)


def _panel_table(board: Board) -> str:
    rows = ((row.title, panel.title, panel.kind.value, panel.about) for row in board.rows for panel in row.panels)
    return _table(("Row", "Panel", "Type", "Meaning"), rows)


def _render_problem_types() -> str:
    rows = ((_code(f"{TYPE_PREFIX}{slug}"), title) for slug, title in sorted(TITLES.items()))
    introduction = "Every error is `application/problem+json` (RFC 9457). Compare `type`, never `title` or `detail`."
    return _page("Problem types", introduction, _table(("Type", "Meaning"), rows))


def main(write: Callable[[str], object] = print) -> None:
    """Write every page below `docs/reference`."""
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in build_pages().items():
        (TARGET / name).write_text(text, encoding="utf-8")
        write(f"docs/reference/{name}")


if __name__ == "__main__":
    main()
