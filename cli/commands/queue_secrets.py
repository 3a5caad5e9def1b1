"""`ebbtide secrets`: sets, lists and deletes the secrets of a queue, and rotates the master key."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.completion import complete_queue_names
from cli.connection import DEFAULT_URL, UrlOption, service_client
from cli.exit_codes import CommandError, RefusedError, UnreachableError
from cli.inputs import has_no_subcommand, raise_input_error
from cli.output import OutputFormat, OutputOption, format_time, print_document, render_facts, render_table

if TYPE_CHECKING:
    from rich.console import RenderableType


app = typer.Typer(name="secrets", help="Set, list or delete the secrets of a queue.")

_SETTLE_S = 2.0
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the secret.")]
QueueOption = Annotated[
    str, typer.Option("--queue", autocompletion=complete_queue_names, help="Queue whose jobs may use the secret.")
]
FileOption = Annotated[
    str | None, typer.Option("--from-file", metavar="FILE", help="File with the value (default: standard input).")
]
KeepOption = Annotated[bool, typer.Option("--keep-old", help="Keep the old keys in the file after the rotation.")]


@app.callback(invoke_without_command=True)
def secrets(
    context: typer.Context,
    queue: QueueOption = "default",
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    if has_no_subcommand(context):
        list_secrets(queue, url, output)


@app.command("set")
def set_secret(
    name: NameArgument,
    queue: QueueOption = "default",
    file: FileOption = None,
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Set a secret to the content of standard input or of a file.

    The value is never an argument, because other users of the machine can read arguments. A newline at the end of
    standard input is removed.
    """
    value = _read_value(file)
    with service_client(url) as client:
        result = client.set_secret(queue, name, value)
    facts = {"secret": name, "queue": queue, "version": str(result["version"])}
    print_document(result, output, lambda: render_facts(facts))


@app.command("list")
def list_secrets(
    queue: QueueOption = "default", url: UrlOption = DEFAULT_URL, output: OutputOption = OutputFormat.TABLE
) -> None:
    """List the secrets of a queue, without their values."""
    with service_client(url) as client:
        result = client.secrets(queue)
    print_document(result, output, lambda: _render_secrets(result, queue))


@app.command("delete")
def delete_secret(
    name: NameArgument,
    queue: QueueOption = "default",
    url: UrlOption = DEFAULT_URL,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Delete a secret. Jobs that need it wait from their next start on."""
    with service_client(url) as client:
        result = client.delete_secret(queue, name)
    print_document(result, output, lambda: render_facts({"secret": f"{name} of queue {queue} deleted"}))


@app.command("rotate-key")
def rotate_key(*, keep_old: KeepOption = False, output: OutputOption = OutputFormat.TABLE) -> None:
    """Create a new master key, and encrypt all data keys with it. Run it where the service runs.

    It uses EBBTIDE_DATABASE_URL and EBBTIDE_SECRETS_KEY_FILE. The service may run meanwhile.
    """
    from api.identity.audit import new_audit_entry
    from api.identity.principals import Principal
    from api.queue_secrets.vault import SecretKeyError, SecretVault, write_key_file
    from cli.master_keys import RESTORE_KEYS, describe_unusable_secrets
    from cli.service_settings import database_errors, read_settings
    from scheduler.domain.owner_ids import LOCAL_OWNER_ID
    from scheduler.store.protocol import UnavailableError
    from scheduler.store.sql_store import SqlStore

    settings = read_settings()
    with database_errors():
        store = SqlStore(settings.database_url, chains_audit=settings.audit_chain)
    path = settings.secrets_key_path
    vault = SecretVault(path, creates=False)
    try:
        used = Counter(secret.master_key for secret in store.secrets.list_secrets(""))
        if unusable := describe_unusable_secrets(path, used):
            raise RefusedError(f"{unusable}. Nothing was changed: {RESTORE_KEYS}.")
        rotated = vault.read_keys().with_new_key()
        write_key_file(path, rotated, replaces=True)
        done = _rewrap_all(vault, store.secrets, rotated.current)
        if not keep_old:
            time.sleep(_SETTLE_S)  # an API process may still store a value that it encrypted before the rotation
            done += _rewrap_all(vault, store.secrets, rotated.current)
            write_key_file(path, rotated.only_current(), replaces=True)
        caller = Principal("command line", (), subject=LOCAL_OWNER_ID)
        entry = new_audit_entry(caller, time.time(), "RotateSecretsKey", rotated.current, after={"secrets": done})
        store.audit_log.append(entry)
    except SecretKeyError as error:
        raise CommandError(str(error)) from error
    except UnavailableError as error:
        raise UnreachableError(str(error)) from error
    except OSError as error:
        raise CommandError(f"the key file {path} cannot be written: {error.strerror}") from error
    finally:
        store.close()
    result = {"key": rotated.current, "secrets": done, "file": str(path)}
    facts = {"key": rotated.current, "secrets": f"{done} encrypted with it", "file": str(path)}
    print_document(result, output, lambda: render_facts(facts))


def _rewrap_all(vault: Any, store: Any, current: str) -> int:
    """Wrap every data key with the current master key, also of secrets that are set meanwhile. Return the number."""
    done = 0
    while outdated := [secret for secret in store.list_secrets("") if secret.master_key != current]:
        done += sum(store.rewrap(vault.rewrap(secret)) for secret in outdated)
    return done


def _read_value(file: str | None) -> bytes:
    if file is not None and file != "-":
        try:
            return Path(file).read_bytes()
        except OSError as error:
            raise_input_error(f"--from-file: {file!r} cannot be read: {error.strerror}")
    if sys.stdin.isatty():
        return str(typer.prompt("Value", hide_input=True)).encode()
    value = sys.stdin.buffer.read()
    return value[:-1].removesuffix(b"\r") if value.endswith(b"\n") else value


def _render_secrets(result: Iterable[Mapping[str, Any]], queue: str) -> RenderableType:
    return render_table(
        (
            [each["name"], str(each["version"]), format_time(each["changed_at_s"]), each["changed_by"]]
            for each in result
        ),
        headers=["name", "version", "changed (UTC)", "by"],
        right_aligned=["version"],
        empty=f"Queue {queue} has no secrets.",
    )
