"""An OpenID Connect issuer on loopback with the authorization code flow. It signs everybody in as the same user."""

from __future__ import annotations

import base64
import json
import secrets
import time
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from tests.http_server import LoopbackServer, QuietHandler

Claims = dict[str, Any]
KEY = ec.generate_private_key(ec.SECP256R1())
CLIENT_ID = "console"
CLIENT_SECRET = "s3cret+with/odd:characters"


class OidcProvider:
    """The issuer. It checks client, redirect URI and PKCE as RFC 6749 and RFC 7636 demand, and each code works once.

    `claims` are added to every identity token; None removes a claim. `refusal` is the error of the next authorization.
    """

    def __init__(self, *, redirect_uri: str, secret: str = "") -> None:
        self.redirect_uri = redirect_uri
        self.secret = secret
        self.claims: Claims = {}
        self.refusal = ""
        self.is_available = True
        self.authorizations: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self._requests_by_code: dict[str, dict[str, str]] = {}
        provider = self

        class Handler(QuietHandler, BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                if not provider.is_available:
                    self.answer(503, {})
                elif url.path == "/authorize":
                    self.redirect(provider.authorize({name: each[0] for name, each in parse_qs(url.query).items()}))
                elif url.path == "/keys":
                    self.answer(200, {"keys": [provider.public_key()]})
                else:
                    self.answer(200, provider.metadata())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {name: each[0] for name, each in parse_qs(body).items()}
                self.answer(*provider.exchange(form, self.headers.get("Authorization", "")))

            def redirect(self, url: str) -> None:
                self.send_response(302)
                self.send_header("Location", url)
                self.end_headers()

            def answer(self, status: int, document: Claims) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

        self.server = LoopbackServer(Handler)
        # Another host name than 127.0.0.1, so that browsers take issuer and console for two sites.
        self.url = self.server.url.replace("127.0.0.1", "localhost")

    def metadata(self) -> Claims:
        names = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
        return {"issuer": self.url, **{name: f"{self.url}/{path}" for name, path in names.items()}}

    def public_key(self) -> Claims:
        return {**jwt.algorithms.ECAlgorithm.to_jwk(KEY.public_key(), as_dict=True), "kid": "ec-1", "use": "sig"}

    def authorize(self, query: dict[str, str]) -> str:
        """Return the URL that the browser is sent to."""
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT_ID
        assert query["redirect_uri"] == self.redirect_uri
        assert query["code_challenge_method"] == "S256"
        self.authorizations.append(query)
        if self.refusal:
            return f"{self.redirect_uri}?{urlencode({'error': self.refusal, 'state': query['state']})}"
        code = secrets.token_urlsafe(16)
        self._requests_by_code[code] = query
        return f"{self.redirect_uri}?{urlencode({'code': code, 'state': query['state']})}"

    def exchange(self, form: dict[str, str], authorization: str) -> tuple[int, Claims]:
        """Return status and document of the token endpoint."""
        query = self._requests_by_code.pop(form.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(sha256(form.get("code_verifier", "").encode()).digest()).rstrip(b"=")
        if query is None or challenge.decode() != query["code_challenge"]:
            return 400, {"error": "invalid_grant"}
        if form.get("redirect_uri") != query["redirect_uri"] or not self._is_client(form, authorization):
            return 401, {"error": "invalid_client"}
        now_s = int(time.time())
        claims = {
            "iss": self.url,
            "aud": CLIENT_ID,
            "sub": "anna",
            "exp": now_s + 300,
            "nonce": query["nonce"],
            "ebbtide": ["submitter"],
            **self.claims,
        }
        content = {name: value for name, value in claims.items() if value is not None}
        self.tokens.append(jwt.encode(content, KEY, algorithm="ES256", headers={"kid": "ec-1"}))
        return 200, {"id_token": self.tokens[-1], "access_token": "unused", "token_type": "Bearer"}

    def _is_client(self, form: dict[str, str], authorization: str) -> bool:
        if not self.secret:
            return form.get("client_id") == CLIENT_ID and not authorization
        pair = base64.b64decode(authorization.partition(" ")[2]).decode()
        return parse_qs(f"pair={pair}")["pair"] == [f"{CLIENT_ID}:{self.secret}"]
