"""`ebbtide doctor` checks an installation, and `ebbtide reset-clock` repairs times that a wrong clock wrote."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from cli.commands.service import DatabaseOption, redact_database_url
from cli.exit_codes import ExitCode
from cli.output import (
    OutputFormat,
    OutputOption,
    format_count,
    format_duration,
    print_document,
    render_facts,
    render_table,
)
from cli.service_settings import InvalidSettingsError, database_errors, load_settings, read_settings

if TYPE_CHECKING:
    from cli.doctor.local_checks import Check


def doctor(database_url: DatabaseOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Check settings, files, database and machine. Changes nothing.

    Run it as the user of the service, with the service's environment variables. The exit code is 1 if a check failed.
    """
    from cli.doctor.local_checks import CheckState

    if database_url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = database_url
    checks = list(run_checks())
    document = {
        "ok": all(check.state is not CheckState.FAILURE for check in checks),
        "checks": [
            {"name": each.name, "state": each.state.value, "message": each.message, "remedy": each.remedy}
            for each in checks
        ],
    }
    rows = [(each.state.value, each.name, each.message, each.remedy) for each in checks]
    headers = ("STATE", "CHECK", "FOUND", "WHAT TO DO")
    print_document(document, output, lambda: render_table(rows, headers=headers))
    if not document["ok"]:
        raise typer.Exit(ExitCode.FAILED)


def run_checks() -> Iterator[Check]:
    """Yield the results of all checks that the settings allow."""
    from cli.doctor.database_checks import check_clock, check_database, check_master_keys
    from cli.doctor.local_checks import (
        answers_health,
        check_authentication,
        check_containment,
        check_files,
        check_policy,
        check_ports,
        check_variables,
    )

    yield from check_variables(os.environ)
    try:
        settings = load_settings()
    except InvalidSettingsError:
        return  # reported above, variable by variable
    yield check_authentication(settings)
    yield check_policy(settings)
    yield from check_files(settings)
    yield from check_database(settings)
    yield from check_master_keys(settings)
    yield from check_clock(settings)
    yield from check_ports(settings, answers_health)
    yield check_containment(settings)


def reset_clock(database_url: DatabaseOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Repair times that a wrong clock wrote. Stop the service first, and correct this machine's clock.

    Times in the future move back by as much as the latest of them is ahead. Does nothing if none is.
    """
    from scheduler.store.clock_reset import reset_clock as repair
    from scheduler.store.offline_use import hold_stopped_database

    if database_url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = database_url
    settings = read_settings()
    now_s = time.time()
    with database_errors(), hold_stopped_database(settings.database_url, now_s=now_s):
        done = repair(settings.database_url, now_s=now_s)
    document = {
        "database_url": redact_database_url(settings.database_url),
        "moved_back_s": done.lead_s if done.rows else 0.0,
        "rows": dict(done.rows),
    }
    facts = {
        "database": redact_database_url(settings.database_url),
        "moved back by": format_duration(done.lead_s) if done.rows else "-",
        "repaired": ", ".join(f"{format_count(count, 'row')} in {name}" for name, count in done.rows.items())
        or "nothing",
    }
    print_document(document, output, lambda: render_facts(facts))
