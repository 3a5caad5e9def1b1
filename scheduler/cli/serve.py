"""`serve` and `migrate`, and the processes that `serve` starts."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli.failure import BadInput, Failed, blaming
from scheduler.cli.output import Format, OutputOption, emit, facts, say

if TYPE_CHECKING:
    from scheduler.settings import Settings

HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on; EBBTIDE_HOST.")]
PortOption = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port to listen on; EBBTIDE_PORT.")]
DatabaseOption = Annotated[
    str | None, typer.Option("--database-url", help="Where all state is kept (SQLAlchemy URL); EBBTIDE_DATABASE_URL.")
]

RestoredOption = Annotated[
    bool, typer.Option("--restored", help="It was restored from a back-up: fence whoever led after that was made.")
]


def serve(host: HostOption = None, port: PortOption = None, database_url: DatabaseOption = None) -> None:
    """Run the service here: the API and the controller, as processes of their own on one database."""
    from scheduler.cli.supervisor import supervise

    given = {"EBBTIDE_HOST": host, "EBBTIDE_PORT": port, "EBBTIDE_DATABASE_URL": database_url}
    os.environ.update({name: str(value) for name, value in given.items() if value is not None})
    settings = read_settings()
    if "EBBTIDE_AUTH" not in os.environ and settings.is_loopback:
        os.environ["EBBTIDE_AUTH"] = "off"
        settings = read_settings()
    _check_auth(settings)
    # Chosen here where that is left to us, not by the API: the controller has to tell its workers the same port.
    os.environ["EBBTIDE_PORT"] = str(_port_to_have(settings))
    settings = read_settings()
    _check_policy(settings)
    _check_traces()
    _migrate(settings)
    say(f"Ebbtide serves {settings.worker_url} on {_shown(settings.database_url)}; Ctrl-C stops it.")
    say(_who_may_ask(settings))
    child = [sys.executable, "-m", "scheduler.cli"]
    with tempfile.TemporaryDirectory(prefix="ebbtide-metrics-") as metrics:
        # Both processes count into this folder, so that one scrape shows the counters of either.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        names = ["API"] if settings.api_processes == 1 else [f"API {at + 1}" for at in range(settings.api_processes)]
        apis = {name: [*child, "api"] for name in names}
        code, why = supervise({"controller": [*child, "controller"], **apis})
    if code:
        raise Failed(why)
    say(f"Ebbtide {why}.")


def migrate(
    database_url: DatabaseOption = None, is_restored: RestoredOption = False, output: OutputOption = Format.TABLE
) -> None:
    """Bring the database to the newest form. Does nothing where it has that already."""
    if database_url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = database_url
    settings = read_settings()
    _migrate(settings, is_restored=is_restored)
    document = {"database_url": _shown(settings.database_url), "revision": "head"}
    emit(document, output, lambda: facts({"database": document["database_url"], "is at": "the newest revision"}))


def controller() -> None:
    """The process that decides (started by `serve`)."""
    from scheduler.cli.supervisor import end_with_parent
    from scheduler.wiring import run_controller

    end_with_parent()
    _start_tracing("ebbtide-controller")
    run_controller(read_settings())


def api() -> None:
    """The process that answers HTTP (started by `serve`)."""
    from scheduler.cli.supervisor import end_with_parent
    from scheduler.wiring import run_api

    settings = read_settings()
    _check_auth(settings)
    end_with_parent()
    _start_tracing("ebbtide-api")
    run_api(settings)


def operator() -> None:
    """Run jobs on Kubernetes: custom resources in and out, decisions from the same database as the API's."""
    from scheduler.telemetry.probes import Probes
    from scheduler.wiring_operator import run_operator

    settings = read_settings()
    _check_policy(settings)
    _start_tracing("ebbtide-operator")
    with blaming("EBBTIDE_HOST, EBBTIDE_PROBE_PORT"):
        probes = Probes(settings.host, settings.probe_port)
    with probes, blaming("EBBTIDE_KUBECONFIG"):
        run_operator(settings, probes)


def read_settings() -> Settings:
    """The settings of the environment. Raises BadInput naming the variable that is wrong."""
    from pydantic import ValidationError

    from scheduler.settings import Settings

    try:
        return Settings()
    except ValidationError as wrong:
        first = wrong.errors()[0]
        name = "EBBTIDE_" + "_".join(str(part) for part in first["loc"]).upper()
        raise BadInput(f"{name}: {first['input']!r} is wrong: {first['msg']}") from wrong


def _port_to_have(settings: Settings) -> int:
    """The port asked for, or a free one. Raises BadInput where it cannot be had: processes that share a port would not
    be told that somebody else has it."""
    import errno
    import socket

    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            found: int = probe.getsockname()[1]
            return found
    except OSError as wrong:
        why = os.strerror(wrong.errno) if wrong.errno else str(wrong)
        if wrong.errno in (errno.EADDRINUSE, errno.EACCES):
            raise BadInput(f"EBBTIDE_PORT: cannot listen on {host}, port {port}: {why}; 0 takes a free one") from wrong
        raise BadInput(f"EBBTIDE_HOST: cannot listen on {host!r}: {why}") from wrong


def _check_auth(settings: Settings) -> None:
    if settings.auth == "off" and not settings.is_loopback:
        raise BadInput(
            f"EBBTIDE_AUTH: got off with EBBTIDE_HOST {settings.host}, which others reach; allowed: on (make a token "
            "with `ebbtide token create`), off with a loopback address, or off-everywhere"
        )


def _who_may_ask(settings: Settings) -> str:
    if settings.auth == "on":
        return "Who asks needs a token: `ebbtide token create --name NAME --grant admin` makes the first one here."
    whom = "everybody on this machine" if settings.is_loopback else f"everybody who reaches {settings.host}"
    return f"Authentication is off: {whom} may do everything; EBBTIDE_AUTH=on asks for tokens."


def _check_policy(settings: Settings) -> None:
    from scheduler.policies.policy_set import policy_set

    with blaming("EBBTIDE_POLICY"):
        policy_set(settings.policy)


def _check_traces() -> None:
    from scheduler.telemetry.traces import traces_wanted

    with blaming(""):
        traces_wanted(os.environ)


def _start_tracing(service: str) -> None:
    from scheduler.telemetry.traces import start_tracing

    with blaming(""):
        start_tracing(service, os.environ)


def _migrate(settings: Settings, *, is_restored: bool = False) -> None:
    from scheduler.store.migrate import migrate as to_newest
    from scheduler.store.restored import take_up

    with blaming("EBBTIDE_DATABASE_URL"):
        (take_up if is_restored else to_newest)(settings.database_url)


def _shown(database_url: str) -> str:
    """A database's URL without the password that it may hold, wherever: read as who connects reads it."""
    from sqlalchemy import make_url

    return make_url(database_url).difference_update_query(("password", "sslpassword")).render_as_string()
