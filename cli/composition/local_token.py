"""The token of the user who runs `ebbtide serve`, and the one-time login code that it prints."""

from __future__ import annotations

import os
import pwd
import re
import time
from dataclasses import dataclass
from pathlib import Path

from api.identity.login_codes import generate_login_code
from api.identity.principals import Grant, Principal, Role, generate_token, token_digest
from cli.local_service import TOKEN_FILE, read_token_file, write_private_file
from scheduler.domain.owner_ids import LOCAL_OWNER_ID
from scheduler.settings import Settings
from scheduler.store.credentials import ApiToken
from scheduler.store.sessions import SignedInUser
from scheduler.store.sql_store import SqlStore


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
            token, secret = _create_token(store, now_s)
            write_private_file(path, secret + "\n")
        if not with_code:
            return LocalLogin(secret, path, "")
        code, code_secret = generate_login_code(SignedInUser(token.id, {}), now_s=now_s)
        store.sessions.add_code(code, now_s=now_s)
        return LocalLogin(secret, path, code_secret)
    finally:
        store.close()


def _create_token(store: SqlStore, now_s: float) -> tuple[ApiToken, str]:
    from api.tokens import TOKEN_NAME_PATTERN, token_audit_entry  # loads the web framework, at the first start only

    creator, name = Principal("ebbtide serve", (), subject=LOCAL_OWNER_ID), _get_user_name()
    if not re.fullmatch(TOKEN_NAME_PATTERN, name):
        name = f"uid-{os.getuid()}"
    grants = [Grant(Role.ADMIN)]
    token, secret = generate_token(name, grants, created_by=creator.name, now_s=now_s, expires_at_s=None)
    store.tokens.add(token, token_audit_entry("CreateToken", token, creator, now_s))
    return token, secret


def _get_user_name() -> str:
    """Return the name of the user of this process; empty if it is unknown."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
