"""The principal that the claims of a verified OpenID Connect token describe.

Roles come from two claims: one lists grants, the other lists groups, which EBBTIDE_OIDC_GROUPS maps to grants.
Roles and groups that mean nothing here are ignored, because other applications use the same issuer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from api.identity.principals import Grant, Principal
from scheduler.domain.owner_ids import build_oidc_owner_id
from scheduler.settings import Settings

_NAME_LENGTH_MAX = 200
_SUBJECT_LENGTH_MAX = 255
"""Limit of `sub` in OpenID Connect Core 1.0, section 2."""


def build_principal(claims: Mapping[str, Any], settings: Settings) -> Principal:
    """Return the principal of verified claims. It is identified by issuer and `sub`, whatever its display name is.

    Raises:
        ValueError: the subject or the name is missing or malformed. The message contains nothing from the token.
    """
    subject = _read_text(claims, "sub", _SUBJECT_LENGTH_MAX)
    name = _read_text(claims, settings.oidc_name_claim, _NAME_LENGTH_MAX)
    grants = dict.fromkeys((*_list_role_grants(claims, settings), *_list_group_grants(claims, settings)))
    return Principal(name, tuple(grants), subject=build_oidc_owner_id(settings.oidc_issuer, subject))


def _read_text(claims: Mapping[str, Any], claim: str, length_max: int) -> str:
    value = claims.get(claim)
    if not isinstance(value, str) or not 0 < len(value) <= length_max or not value.isprintable():
        raise ValueError(f"its claim {claim} is missing or not a text of at most {length_max} printable characters")
    return value


def _list_role_grants(claims: Mapping[str, Any], settings: Settings) -> Iterator[Grant]:
    for text in _read_texts(claims, settings.oidc_roles_claim):
        try:
            yield Grant.parse(text)
        except ValueError:
            continue


def _list_group_grants(claims: Mapping[str, Any], settings: Settings) -> Iterator[Grant]:
    for group in _read_texts(claims, settings.oidc_groups_claim):
        yield from map(Grant.parse, settings.oidc_groups.get(group, ()))


def _read_texts(claims: Mapping[str, Any], claim: str) -> list[str]:
    """Return the texts of a claim that is a list or a single text."""
    value = claims.get(claim, [])
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
