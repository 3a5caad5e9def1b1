"""`ebbtide backup` and `ebbtide restore`: the database and the secrets outside it, as one file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands.service import DatabaseOption, redact_database_url
from cli.exit_codes import CommandError, InputError, RefusedError
from cli.inputs import input_errors_from
from cli.master_keys import RESTORE_KEYS, count_secrets_by_key, describe_unusable_secrets
from cli.output import OutputFormat, OutputOption, format_bytes, format_count, format_time, print_document, render_facts
from cli.service_settings import database_errors, read_settings

if TYPE_CHECKING:
    from scheduler.settings import Settings


_UMASK = 0o077
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The backup, one file.")]
WithoutSecretsOption = Annotated[
    bool, typer.Option("--without-secrets", help="Leave out the secrets. Then back up their files separately.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace a database that is not empty, and secrets that differ.")
]
NOT_INCLUDED = "checkpoints, uploaded working directories and logs"


def backup(
    file: FileArgument,
    has_no_secrets: WithoutSecretsOption = False,
    database_url: DatabaseOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Back up the database and its secrets to a file, while the service runs.

    Checkpoints, uploaded working directories and logs are not included: copy their folders. Neither are the master
    keys of secrets: copy their file to another place than the backup.
    """
    from scheduler.store.backup import write_backup

    os.umask(_UMASK)
    settings = _read_settings(database_url)
    secrets = {} if has_no_secrets else _read_secrets(settings)
    try:
        with database_errors():
            made = write_backup(settings.database_url, file, files=secrets, now_s=time.time())
            used = count_secrets_by_key(settings)
    except FileExistsError as error:
        raise InputError(f"FILE: {file} exists. Name a new file, or delete it first.") from error
    except OSError as error:
        raise CommandError(f"{file}: cannot be written: {error.strerror or error}") from error
    document = {
        "file": str(file),
        "bytes": file.stat().st_size,
        "database_url": redact_database_url(settings.database_url),
        "revision": made.revision,
        "secrets": sorted(made.files),
        "master_keys": sorted(used),
        "master_key_file": str(settings.secrets_key_path),
    }
    facts = {
        "backup": f"{file}, {format_bytes(file.stat().st_size)}",
        "database": document["database_url"],
        "secrets": ", ".join(sorted(made.files)) or "none",
        "not included": NOT_INCLUDED,
    }
    if used:
        count = format_count(sum(used.values()), "secret")
        facts["copy apart"] = f"{settings.secrets_key_path}: without it, {count} of queues cannot be decrypted"
    print_document(document, output, lambda: render_facts({name: str(fact) for name, fact in facts.items()}))


def restore(
    file: FileArgument,
    is_forced: ForceOption = False,
    database_url: DatabaseOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Restore the database and its secrets from a backup. Stop the service first; agents and jobs may go on.

    An older backup is migrated. Ranks of runs that the backup knows go on. Ranks of later runs save and exit, and
    their jobs restart from their last checkpoint. Jobs that were submitted after the backup end.
    """
    from scheduler.store.backup import read_backup, restore_backup
    from scheduler.store.offline_use import hold_stopped_database

    os.umask(_UMASK)
    settings = _read_settings(database_url)
    with input_errors_from(""):
        found = read_backup(file)
    _check_secrets(settings, found.files, is_forced=is_forced)
    now_s = time.time()
    with database_errors(), hold_stopped_database(settings.database_url, now_s=now_s):
        restore_backup(file, settings.database_url, now_s=now_s, is_forced=is_forced)
        used = count_secrets_by_key(settings)
    _write_secrets(settings, found.files)
    unusable = describe_unusable_secrets(settings.secrets_key_path, used)
    document = {
        "file": str(file),
        "created_at_s": found.created_at_s,
        "database_url": redact_database_url(settings.database_url),
        "secrets": sorted(found.files),
        "unusable_secrets": unusable,
    }
    facts = {
        "backup": f"{file} of {format_time(found.created_at_s)} UTC",
        "database": document["database_url"],
        "secrets": ", ".join(sorted(found.files)) or "none",
        "next": "start the service",
    }
    if unusable:
        facts |= {"missing": unusable, "next": f"{RESTORE_KEYS}; then start the service"}
    print_document(document, output, lambda: render_facts({name: str(fact) for name, fact in facts.items()}))


def _read_settings(database_url: str | None) -> Settings:
    if database_url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = database_url
    return read_settings()


def _list_secret_paths(settings: Settings) -> dict[str, Path]:
    """Return the files outside the database without which a restored one is of little use, by setting."""
    return {"EBBTIDE_TOKEN_SECRET_FILE": settings.token_secret_path}


def _read_secrets(settings: Settings) -> dict[str, bytes]:
    """Return the content of each file that exists. A service that never ran has none."""
    try:
        return {name: path.read_bytes() for name, path in _list_secret_paths(settings).items() if path.exists()}
    except OSError as error:
        raise CommandError(
            f"{error.filename}: cannot be read: {error.strerror}. Run as the user of the service, or add "
            "--without-secrets."
        ) from error


def _check_secrets(settings: Settings, files: Mapping[str, bytes], *, is_forced: bool) -> None:
    """Refuse to replace a secret by another one unless that is forced."""
    for name, path in _list_secret_paths(settings).items():
        if name in files and not is_forced and path.exists() and path.read_bytes() != files[name]:
            raise RefusedError(
                f"{name}: {path} holds another secret than the backup. Move it away, or add --force to replace it."
            )


def _write_secrets(settings: Settings, files: Mapping[str, bytes]) -> None:
    for name, path in _list_secret_paths(settings).items():
        if name not in files or (path.exists() and path.read_bytes() == files[name]):
            continue
        temporary = path.with_name(f"{path.name}.restored")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as target:
                target.write(files[name])
            temporary.replace(path)
        except OSError as error:
            raise CommandError(f"{name}: {path} cannot be written: {error.strerror or error}") from error
