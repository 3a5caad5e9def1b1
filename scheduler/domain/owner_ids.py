"""Ids of owners: stable names of callers, which two callers with the same display name do not share."""

from __future__ import annotations

LOCAL_OWNER_ID = "local"
"""Whoever uses the service on its own machine, without a token of the database."""
LOCAL_OWNER_NAME = "anybody"
OIDC_PREFIX = "oidc:"
_NAME_PREFIX = "name:"
_NAMESPACE_NAME_PREFIX = "namespace/"


def build_token_owner_id(token_id: str) -> str:
    return f"token:{token_id}"


def build_account_owner_id(account_id: str) -> str:
    return f"account:{account_id}"


def build_oidc_owner_id(issuer: str, subject: str) -> str:
    """Return the id of a subject, which is unique only within its issuer."""
    return f"{OIDC_PREFIX}{issuer}#{subject}"


def build_namespace_owner_id(namespace: str) -> str:
    """Return the id that owns the jobs of all ElasticJobs in a namespace."""
    return f"namespace:{namespace}"


def build_namespace_owner_name(namespace: str) -> str:
    return f"{_NAMESPACE_NAME_PREFIX}{namespace}"


def derive_owner_id(name: str) -> str:
    """Return the id of an owner of whom only the display name was stored, as in releases before owners had ids.

    API tokens that existed when the database was migrated have the id of their name, so they still own what they
    created. Callers that appeared later never have such an id. The migration of the database repeats this rule in SQL.
    """
    if name == LOCAL_OWNER_NAME:
        return LOCAL_OWNER_ID
    if name.startswith(_NAMESPACE_NAME_PREFIX):
        return build_namespace_owner_id(name.removeprefix(_NAMESPACE_NAME_PREFIX))
    return f"{_NAME_PREFIX}{name}" if name else ""


def get_idempotency_scope(owner_id: str) -> str:
    """Return the text that separates the idempotency keys of owners.

    For the id of a name it is the name, as in releases before owners had ids, so a retry after an upgrade finds the
    first request.
    """
    return owner_id.removeprefix(_NAME_PREFIX)
