"""Sign-in to the web console: by token, by one-time login code, and at an OpenID Connect issuer.

Every way ends with `POST /sign-in` of the page, which opens the session. So the cookie can be SameSite=Strict, and no
secret of a session is ever in a URL: a login code is in the fragment, which browsers do not send.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal
from urllib.parse import urlencode, urlsplit

from fastapi import Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from api.http.dependencies import PrincipalDep, Router, Service, ServiceDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict, raise_invalid_field
from api.identity.authentication import Authenticator, raise_unauthenticated
from api.identity.authorization import PUBLIC, VIEWER, requires
from api.identity.login_codes import generate_login_code
from api.identity.oidc import InvalidTokenError
from api.identity.oidc_provider import IssuerUnavailableError
from api.identity.oidc_sign_in import STATE_COOKIE, STATE_S, OidcSignIn, SignInDeniedError, SignInExpiredError
from api.identity.principals import Principal, token_digest
from api.identity.sessions import (
    REDIRECT_CODE_S,
    encode_principal,
    generate_session,
    read_session_authorization,
    refuse_foreign_page,
    session_audit_entry,
    session_cookie_name,
)
from scheduler.documents.document import Document
from scheduler.store.sessions import SignedInUser

logger = logging.getLogger(__name__)
router = Router(include_in_schema=False)

_NO_STORE = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
_COOKIE_PATH = "/sign-in"
_CODE_LENGTH_MAX = 4096
_FOUND = 302
_SEE_OTHER = 303
_UNAVAILABLE = "unavailable"
_PROBLEM_BY_ERROR: Mapping[type[Exception], str] = {
    SignInExpiredError: "expired",
    SignInDeniedError: "denied",
    InvalidTokenError: "failed",
}
"""Words for the page, which has a sentence for each."""
SecretText = Annotated[str, Field(max_length=8192)]


class SignInDocument(Document):
    """A token or a login code."""

    token: SecretText = Field(default="", description="API token or JWT.")
    code: SecretText = Field(default="", description="One-time login code.")


@router.get("/sign-in")
@requires(PUBLIC)
async def list_sign_in_methods(service: ServiceDep) -> Response:
    """The ways to sign in. None while authentication is off."""
    methods = [] if service.authenticator is None else ["token"]
    issuer = ""
    if service.oidc_sign_in is not None:
        methods.append("oidc")
        issuer = urlsplit(service.settings.oidc_issuer).hostname or ""
    return JSONResponse({"methods": methods, "issuer": issuer}, headers=_NO_STORE)


@router.post("/sign-in")
@requires(PUBLIC)
async def sign_in(document: SignInDocument, request: Request, service: ServiceDep) -> Response:
    """Open a session. The page keeps the key of the response; the browser keeps the cookie."""
    refuse_foreign_page(request, service.settings)
    authenticator = _get_authenticator(service)
    if bool(document.token) == bool(document.code):
        raise_invalid_field("token", None, "either a token or a code")
    if document.token:
        address = _address(request)
        user, principal = await authenticator.authenticate_user(f"Bearer {document.token}", address)
    else:
        user, principal = await _redeem_code(service, authenticator, request, document.code)
    now_s = service.clock.now_s()
    session, cookie, key = generate_session(user, now_s=now_s, session_s=service.settings.session_s)
    entry = session_audit_entry("SignIn", session.id, principal, now_s)
    await run_in_threadpool(service.store.sessions.add, session, entry)
    content = {"key": key, "name": principal.name, "expires_at_s": session.expires_at_s}
    response = JSONResponse(content, 201, headers=_NO_STORE)
    _set_cookie(response, request, session_cookie_name(service.settings), cookie, session.expires_at_s - now_s)
    response.delete_cookie(STATE_COOKIE, path=_COOKIE_PATH)
    return response


@router.post("/sign-out")
@requires(PUBLIC)
async def sign_out(request: Request, service: ServiceDep) -> Response:
    """End the session of the request. Every process rejects it within 5 s. Without a session, nothing changes."""
    refuse_foreign_page(request, service.settings)
    if authorization := read_session_authorization(request, service.settings):
        await run_in_threadpool(_end_session, service, authorization.partition(" ")[2])
    response = Response(status_code=204, headers=_NO_STORE)
    response.delete_cookie(session_cookie_name(service.settings))
    return response


@router.get("/sign-in/oidc")
@requires(PUBLIC)
async def start_oidc_sign_in(
    request: Request, service: ServiceDep, canonical: Annotated[bool, Query()] = False
) -> Response:
    """Send the browser to the issuer.

    The issuer returns it to the console's URL. A browser that uses another name of this service, such as localhost,
    goes there first, because it would not send the state cookie of one host to another.
    """
    oidc, home = _get_oidc(service), service.settings.browser_url
    if not canonical and request.headers.get("Host", "").lower() != urlsplit(home).netloc.lower():
        return RedirectResponse(f"{home}/sign-in/oidc?canonical=true", _FOUND, headers=_NO_STORE)
    try:
        url, cookie = await oidc.start(now_s=service.clock.now_s(), elapsed_s=service.clock.elapsed_s())
    except IssuerUnavailableError:
        return _return_to_page(problem=_UNAVAILABLE)
    response = RedirectResponse(url, _FOUND, headers=_NO_STORE)
    # Lax: the issuer's redirect is a navigation from another site.
    _set_cookie(response, request, STATE_COOKIE, cookie, STATE_S, path=_COOKIE_PATH, same_site="lax")
    return response


@router.get("/sign-in/oidc/callback")
@requires(PUBLIC)
async def finish_oidc_sign_in(
    request: Request,
    service: ServiceDep,
    code: Annotated[str, Query(max_length=_CODE_LENGTH_MAX)] = "",
    state: Annotated[str, Query(max_length=200)] = "",
    error: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    """Take the browser back from the issuer, and hand its page a login code that only this browser can use."""
    oidc, authenticator = _get_oidc(service), _get_authenticator(service)
    failures: tuple[type[Exception], ...] = (*_PROBLEM_BY_ERROR, IssuerUnavailableError)
    try:
        with authenticator.charge_failures(_address(request), *_PROBLEM_BY_ERROR):
            now_s = service.clock.now_s()
            known = oidc.check_state(request.cookies.get(STATE_COOKIE, ""), now_s=now_s)
            if known != state:
                raise SignInExpiredError("the state is of another sign-in")
            if error or not code:
                raise SignInDeniedError(f"the issuer answered {error!r}")
            identity = await oidc.finish(code, state, elapsed_s=service.clock.elapsed_s())
    except failures as failure:
        logger.warning("sign-in at the issuer failed: %s", failure)
        return _return_to_page(problem=_PROBLEM_BY_ERROR.get(type(failure), _UNAVAILABLE))
    user = SignedInUser("", encode_principal(identity.principal), identity.expires_at_s)
    stored, secret = generate_login_code(user, now_s=now_s, lifetime_s=REDIRECT_CODE_S, browser=_browser_digest(state))
    await run_in_threadpool(partial(service.store.sessions.add_code, stored, now_s=now_s))
    return _return_to_page(code=secret)


async def _redeem_code(
    service: Service, authenticator: Authenticator, request: Request, code: str
) -> tuple[SignedInUser, Principal]:
    """Take a login code, and return the user that it stands for.

    Raises:
        ProblemError: 401 if the code is unknown, used, expired or for another browser, or if its token has ended.
    """
    state = ""
    if service.oidc_sign_in is not None:
        with suppress(SignInExpiredError):
            state = service.oidc_sign_in.check_state(request.cookies.get(STATE_COOKIE, ""), now_s=service.clock.now_s())
    take = partial(service.store.sessions.take_code, browser=_browser_digest(state), now_s=service.clock.now_s())
    with authenticator.charge_failures(_address(request)):
        taken = await run_in_threadpool(take, token_digest(code))
        if taken is None:
            raise_unauthenticated("the login URL was used or has expired. `ebbtide console` prints a new one")
        return taken.user, await run_in_threadpool(authenticator.load_principal, taken.user)


def _end_session(service: Service, credential: str) -> None:
    session = service.store.sessions.find(token_digest(credential))
    if session is None or service.authenticator is None:
        return
    with suppress(ProblemError):  # the token has ended, and the session with it
        principal = service.authenticator.load_principal(session.user)
        entry = session_audit_entry("SignOut", session.id, principal, service.clock.now_s())
        service.store.sessions.delete(session.id, entry)


def _return_to_page(**answer: str) -> Response:
    """Return to the page of this origin. The answer is in the fragment, which no server and no log sees."""
    return RedirectResponse(f"/#/login?{urlencode(answer)}", _SEE_OTHER, headers=_NO_STORE)


def _set_cookie(
    response: Response,
    request: Request,
    name: str,
    value: str,
    max_age_s: float,
    *,
    path: str = "/",
    same_site: Literal["strict", "lax"] = "strict",
) -> None:
    """Set a cookie for this host that scripts cannot read, and that browsers send over TLS only if they use TLS."""
    uses_tls = "https" in (request.url.scheme, urlsplit(request.headers.get("Origin", "")).scheme)
    is_secure = uses_tls or request.app.state.service.settings.browser_url.startswith("https:")
    response.set_cookie(
        name, value, max_age=int(max_age_s), path=path, secure=is_secure, httponly=True, samesite=same_site
    )


def _browser_digest(state: str) -> str:
    """Return the digest that binds a login code to the browser with this state cookie; empty without a state."""
    return token_digest(f"{STATE_COOKIE} {state}") if state else ""


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _get_authenticator(service: Service) -> Authenticator:
    return service.authenticator or raise_conflict("authentication is off, so no sign-in is needed")


def _get_oidc(service: Service) -> OidcSignIn:
    return service.oidc_sign_in or raise_conflict(
        "the console has no OpenID Connect issuer. Set EBBTIDE_OIDC_ISSUER and EBBTIDE_OIDC_CLIENT_ID, or use a token"
    )


login_code_router = create_router("identity")


class LoginCodeView(TypedDict):
    """A one-time login code for the web console."""

    code: Annotated[str, Field(description="Text to append to the console's URL as `/#/login?code=`. Works once.")]
    expires_at_s: Annotated[float, Field(description="End of validity, in seconds since 1970 (UTC).")]


@login_code_router.post("/login-codes", status_code=201, responses=problem_responses(409))
@requires(VIEWER)
def create_login_code(service: ServiceDep, principal: PrincipalDep, response: Response) -> LoginCodeView:
    """Create a one-time code that signs a browser in to the web console as the caller, within 15 minutes.

    The caller must use an API token. The session ends with that token.
    """
    if service.authenticator is None:
        raise_conflict("authentication is off, so the console needs no login code")
    if not principal.token_id:
        raise_conflict("login codes are for callers with an API token. Sign in at the console in another way")
    now_s = service.clock.now_s()
    stored, secret = generate_login_code(SignedInUser(principal.token_id, {}), now_s=now_s)
    entry = session_audit_entry("CreateLoginCode", principal.token_id, principal, now_s)
    service.store.sessions.add_code(stored, now_s=now_s, audit=entry)
    response.headers["Cache-Control"] = "no-store"
    return {"code": secret, "expires_at_s": stored.expires_at_s}
