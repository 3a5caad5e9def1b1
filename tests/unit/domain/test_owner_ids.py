"""Ids of owners, and those of owners of whom only a name was stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.commands import Command, PauseLending
from scheduler.domain.owner_ids import build_oidc_owner_id, derive_owner_id, get_idempotency_scope
from scheduler.scheduling.policies.quota import QuotaState
from tests.builders import a_fleet, a_job, a_snapshot


@pytest.mark.parametrize(
    ("name", "owner_id"),
    [("anna", "name:anna"), ("anybody", "local"), ("namespace/ml", "namespace:ml"), ("", "")],
)
def test_an_owner_of_whom_only_the_name_is_known_has_the_id_of_the_name(name: str, owner_id: str) -> None:
    assert derive_owner_id(name) == owner_id
    assert (
        replace(a_job("j"), owner=name).owner_key == Command("c", 1.0, PauseLending(), actor=name).actor_key == owner_id
    )


def test_jobs_of_one_name_and_two_owners_count_separately() -> None:
    first = replace(a_job("j"), owner="anna", owner_id="token:tok-1")
    assert first.owner_key == "token:tok-1"
    quota = QuotaState(a_snapshot(a_fleet(training=1, inference=0)))
    assert quota.user_key(first) != quota.user_key(replace(first, owner_id="token:tok-2"))


def test_idempotency_keys_of_older_releases_stay_valid() -> None:
    assert get_idempotency_scope(derive_owner_id("anna")) == "anna"
    subject = build_oidc_owner_id("https://idp.example", "anna")
    assert get_idempotency_scope(subject) == subject == "oidc:https://idp.example#anna"
