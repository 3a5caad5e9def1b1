"""A service with authentication, and tokens for it."""

from __future__ import annotations

from typing import Any

import httpx

from api.identity.principals import Grant, generate_token
from scheduler.settings import Settings
from scheduler.store.api_protocol import ApiStore, AuditEntry
from scheduler.store.credentials import ApiToken
from tests.api.conftest import JOB, NOW_S, ApiService

MADE = AuditEntry(NOW_S, "tests", "", "CreateToken", "", None, None, "")


class AuthenticatedService(ApiService):
    """A service with authentication whose fleet and queues are created by an admin named root."""

    def __init__(self, store: ApiStore | None = None, **settings: Any) -> None:
        super().__init__(Settings(**{"auth": "on", "rate_burst": 10_000, **settings}), store)
        self.root = self.token("root", "admin")

    def token(self, name: str, *grants: str, life_s: float | None = None) -> str:
        return self.create_token(name, *grants, life_s=life_s)[1]

    def create_token(self, name: str, *grants: str, life_s: float | None = None) -> tuple[ApiToken, str]:
        now_s = self.clock.now_s()
        token, secret = generate_token(
            name,
            map(Grant.parse, grants),
            created_by="tests",
            now_s=now_s,
            expires_at_s=None if life_s is None else now_s + life_s,
        )
        self.store.tokens.add(token, MADE)
        return token, secret

    def request(self, method: str, path: str, token: str, document: object = None) -> httpx.Response:
        return self.http.request(method, path, json=document, headers={"Authorization": f"Bearer {token}"})

    def job(self, token: str, queue: str, name: str = "train") -> str:
        document = {**JOB, "name": name, "queue": queue, "steps": 1000}
        answer = self.request("POST", "/v1/jobs", token, document)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def with_fleet(self) -> AuthenticatedService:
        for path, document in (
            ("/v1/pools", {"name": "training", "kind": "training"}),
            ("/v1/nodes", {"name": "t0", "pool": "training", "gpu": "cpu", "gpus": 2}),
            ("/v1/queues", {"name": "research"}),
            ("/v1/queues", {"name": "vision"}),
        ):
            answer = self.request("POST", path, self.root, document)
            assert answer.status_code == 201, answer.text
        return self
