"""The token of the user who runs `ebbtide serve`, and the one-time login code that it prints."""

from __future__ import annotations

import os
import pwd
import re
import time
from dataclasses import dataclass
from pathlib import Path

from api.identity.principals import Grant, Principal, Role, generate_token, token_digest
from api.identity.sessions import generate_login_code
from api.tokens import TOKEN_NAME_PATTERN, token_audit_entry
from cli.local_service import TOKEN_FILE, read_token_file, write_private_file
from scheduler.domain.owner_ids import LOCAL_OWNER_ID
from scheduler.settings import Settings
from scheduler.store.sessions import SignedInUser
from scheduler.store.sql_store import SqlStore

_CREATOR = Principal("ebbtide serve", (), subject=LOCAL_OWNER_ID)


@dataclass(frozen=True, slots=True)
class LocalLogin:
    """The local user's token, the file with it, and a login code for the console; empty if none was requested."""

    token: str
    token_file: Path
    login_code: str


def prepare_local_login(settings: Settings, *, with_code: bool) -> LocalLogin:
    """Return the token in the run directory, which is created if the database does not accept it.

    A token is used across restarts until it is revoked.
    """
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    path = settings.run_dir / TOKEN_FILE
    secret, now_s = read_token_file(path), time.time()
    store = SqlStore(settings.database_url)
    try:
        token = store.tokens.find_by_digest(token_digest(secret)) if secret else None
        if token is None or not token.is_live(now_s):
            name, grants = _get_user_name(), [Grant(Role.ADMIN)]
            token, secret = generate_token(name, grants, created_by=_CREATOR.name, now_s=now_s, expires_at_s=None)
            store.tokens.add(token, token_audit_entry("CreateToken", token, _CREATOR, now_s))
            write_private_file(path, secret + "\n")
        if not with_code:
            return LocalLogin(secret, path, "")
        code, code_secret = generate_login_code(SignedInUser(token.id, {}), now_s=now_s)
        store.sessions.add_code(code, now_s=now_s)
        return LocalLogin(secret, path, code_secret)
    finally:
        store.close()


def _get_user_name() -> str:
    """Return the name of the user of this process, or uid-N if it is unknown or not a token's name."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = ""
    return name if re.fullmatch(TOKEN_NAME_PATTERN, name) else f"uid-{os.getuid()}"
