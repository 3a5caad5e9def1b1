"""JWTs of an OIDC issuer, against a real issuer on loopback with real keys."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from api.identity import oidc_provider
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import Problem
from tests.http_server import LoopbackServer, QuietHandler

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
Claims = dict[str, Any]


class Provider:
    """An issuer. `keys` are the published keys; None makes it fail. `asked` records the requested paths."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] | None = [_jwk(RSA_KEY, "rsa-1"), _jwk(EC_KEY, "ec-1")]
        self.asked: list[str] = []
        provider = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                self.send_response(503 if provider.keys is None else 200)
                self.end_headers()
                discovery = {"issuer": provider.url, "jwks_uri": f"{provider.url}/keys"}
                document = {"keys": provider.keys} if self.path == "/keys" else discovery
                self.wfile.write(json.dumps(document).encode())

        self.server = LoopbackServer(Handler)
        self.url = self.server.url

    def claims(self, **changes: Any) -> Claims:
        now_s = int(time.time())
        content = {
            "iss": self.url,
            "aud": "ebbtide",
            "sub": "anna",
            "exp": now_s + 300,
            "ebbtide": ["submitter:research"],
        }
        return {name: value for name, value in {**content, **changes}.items() if value is not None}


def _jwk(key: Any, kid: str) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    content: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {**content, "kid": kid, "use": "sig"}


def signed(claims: Claims, key: Any = RSA_KEY, alg: str = "RS256", kid: str = "rsa-1") -> str:
    return jwt.encode(claims, key, algorithm=alg, headers={"kid": kid})


def _signed_with_the_public_key(claims: Claims) -> str:
    """A token signed with the public key as HMAC secret, which a verifier that trusts its `alg` accepts."""
    public = RSA_KEY.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    parts = ({"alg": "HS256", "typ": "JWT", "kid": "rsa-1"}, claims)
    content = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    digest = hmac.new(public, content, sha256).digest()
    return (content + b"." + base64.urlsafe_b64encode(digest).rstrip(b"=")).decode()


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    with made.server:
        yield made


@pytest.fixture
def guarded(provider: Provider) -> Iterator[AuthenticatedService]:
    made = AuthenticatedService(oidc_issuer=provider.url).with_fleet()
    yield made
    made.http.close()


def test_a_jwt_gives_name_and_roles(guarded: AuthenticatedService, provider: Provider, problem: Problem) -> None:
    token = signed(provider.claims())
    assert guarded.request("GET", "/v1/whoami", token).json() == {
        "name": "anna", "owner_id": f"oidc:{provider.url}#anna", "grants": ["submitter:research"], "token_id": "",
    }  # fmt: skip
    job = guarded.job(token, "research")
    assert guarded.request("GET", f"/v1/jobs/{job}", token).json()["owner"] == "anna"
    problem(guarded.request("POST", "/v1/lending:pause", token), 403)
    problem(guarded.request("DELETE", f"/v1/jobs/{job}", guarded.token("anna", "submitter:research")), 403)
    assert provider.asked == ["/.well-known/openid-configuration", "/keys"], "the keys are fetched once"


def test_elliptic_curve_keys_work_and_foreign_roles_are_ignored(
    guarded: AuthenticatedService, provider: Provider
) -> None:
    token = signed(provider.claims(ebbtide=["offline_access", "viewer", 7]), EC_KEY, "ES256", "ec-1")
    assert guarded.request("GET", "/v1/whoami", token).json()["grants"] == ["viewer"]


def test_a_jwt_without_roles_is_forbidden(guarded: AuthenticatedService, provider: Provider, problem: Problem) -> None:
    detail = problem(guarded.request("GET", "/v1/jobs", signed(provider.claims(ebbtide=None))), 403)["detail"]
    assert detail == "this needs the role viewer; you are anna with no role"


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1_600_000_000}, {"exp": None}, {"nbf": 4_000_000_000}, {"iss": "https://other.example"}, {"iss": None},
        {"aud": "another"}, {"aud": None}, {"sub": None}, {"sub": 7}, {"sub": "a\nb"},
    ],
)  # fmt: skip
def test_invalid_claims_are_refused(
    guarded: AuthenticatedService, provider: Provider, problem: Problem, changes: Claims
) -> None:
    response = guarded.request("GET", "/v1/jobs", signed(provider.claims(**changes)))
    assert problem(response, 401)["type"].endswith(":unauthenticated")


def test_foreign_signatures_are_refused(guarded: AuthenticatedService, provider: Provider, problem: Problem) -> None:
    claims = provider.claims()
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    head, body, _ = signed(claims).split(".")
    for token in (
        signed(claims, other),
        _signed_with_the_public_key(claims),
        jwt.encode(claims, "", algorithm="none", headers={"kid": "rsa-1"}),
        signed(claims, RSA_KEY, "PS256"),
        signed(claims, EC_KEY, "ES256", "rsa-1"),
        f"{head}.{body}.",
        f"{head}.{signed(provider.claims(sub='root')).split('.')[1]}.{signed(claims).split('.')[2]}",
    ):
        problem(guarded.request("GET", "/v1/jobs", token), 401)


def test_symmetric_keys_of_the_issuer_are_ignored(
    guarded: AuthenticatedService, provider: Provider, problem: Problem
) -> None:
    secret = b"k" * 32
    provider.keys = [{"kty": "oct", "k": "a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s", "kid": "s", "alg": "HS256"}]
    problem(guarded.request("GET", "/v1/jobs", signed(provider.claims(), secret, "HS256", "s")), 401)


def test_new_keys_are_fetched_at_a_limited_rate(
    guarded: AuthenticatedService, provider: Provider, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guarded.request("GET", "/v1/jobs", signed(provider.claims())).status_code == 200
    for number in range(5):
        problem(guarded.request("GET", "/v1/jobs", signed(provider.claims(), kid=f"invented-{number}")), 401)
    assert provider.asked.count("/keys") == 1
    assert provider.keys is not None
    provider.keys = [_jwk(EC_KEY, "ec-2")]
    monkeypatch.setattr(oidc_provider, "FETCH_INTERVAL_MIN_S", 0.0)
    assert guarded.request("GET", "/v1/jobs", signed(provider.claims(), EC_KEY, "ES256", "ec-2")).status_code == 200


def test_an_unreachable_issuer_is_a_503_for_jwts_only(
    guarded: AuthenticatedService, provider: Provider, problem: Problem
) -> None:
    provider.keys = None
    for _ in range(2):
        answer = guarded.request("GET", "/v1/jobs", signed(provider.claims()))
        assert problem(answer, 503)["type"].endswith(":issuer-unavailable")
        assert answer.headers["Retry-After"]
    assert guarded.request("GET", "/v1/jobs", guarded.root).status_code == 200


def test_known_keys_work_while_the_issuer_is_unreachable(
    guarded: AuthenticatedService, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guarded.request("GET", "/v1/jobs", signed(provider.claims())).status_code == 200
    monkeypatch.setattr(oidc_provider, "DOCUMENTS_TTL_S", 0.0)
    monkeypatch.setattr(oidc_provider, "FETCH_INTERVAL_MIN_S", 0.0)
    provider.keys = None
    for name in ("berta", "carla"):
        assert guarded.request("GET", "/v1/jobs", signed(provider.claims(sub=name))).status_code == 200


def test_without_an_issuer_jwts_are_refused(problem: Problem, provider: Provider) -> None:
    with (guarded := AuthenticatedService()).http:
        problem(guarded.request("GET", "/v1/jobs", signed(provider.claims())), 401)
    assert provider.asked == []
