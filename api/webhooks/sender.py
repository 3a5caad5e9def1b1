"""One attempt to deliver a message: where it may go, for how long, and how much of the answer is read."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from api.webhooks.addresses import RefusedAddressError, Resolver, addresses_of, resolved

TIMEOUT_S = 10.0
CONNECT_S = 5.0
ANSWER_BYTES_MAX = 1024
ADDRESSES_TRIED = 2
GONE = 410


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` is None where no answer came. `error` is empty where the receiver took the message."""

    status: int | None
    error: str = ""
    retry_after_s: float = 0.0

    @property
    def is_delivered(self) -> bool:
        return not self.error


def trusting(ca_file: Path | None = None) -> ssl.SSLContext:
    """Trusts the public authorities, and those of the PEM file."""
    context = httpx.create_ssl_context(trust_env=False)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


@dataclass(frozen=True, slots=True)
class Sender:
    """`timeout_s` is for a whole attempt, names looked up and answer read, however slowly either comes. `trust`: whose
    certificates a receiver may show; an attempt is over where it shows another, or one of another name."""

    hosts: frozenset[str] = frozenset()
    resolve: Resolver = resolved
    timeout_s: float = TIMEOUT_S
    now: Callable[[], float] = time.time
    trust: ssl.SSLContext = field(default_factory=trusting)

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Outcome:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._send(httpx.URL(url), headers, body)
        except TimeoutError:
            return Outcome(None, f"no answer within {self.timeout_s:g} s")
        except RefusedAddressError as refused:
            return Outcome(None, str(refused))
        except httpx.ConnectError as broken:
            return Outcome(None, _refused_certificate(broken) or f"ConnectError: {broken}")
        except httpx.HTTPError as broken:
            return Outcome(None, f"{type(broken).__name__}: {broken}".removesuffix(": "))
        except (httpx.InvalidURL, UnicodeError) as malformed:  # such as a label that is empty, or too long
            return Outcome(None, f"its host can be none: {malformed}")
        except OSError as unknown:
            return Outcome(None, f"{httpx.URL(url).host} has no address: {unknown.strerror or unknown}")

    async def _send(self, url: httpx.URL, headers: Mapping[str, str], body: bytes) -> Outcome:
        port = url.port or (443 if url.scheme == "https" else 80)
        *spare, last = (await addresses_of(url.host, port, self.hosts, self.resolve))[:ADDRESSES_TRIED]
        # No proxy of the environment: it would look the name up again, elsewhere.
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_S)
        async with httpx.AsyncClient(timeout=timeout, verify=self.trust, trust_env=False) as http:
            for address in spare:
                try:
                    return await self._post(http, url, address, headers, body)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    continue
            return await self._post(http, url, last, headers, body)

    async def _post(
        self, http: httpx.AsyncClient, url: httpx.URL, address: str, headers: Mapping[str, str], body: bytes
    ) -> Outcome:
        """Connects to the address by number; certificate and Host are the name's."""
        request = http.build_request(
            "POST",
            url.copy_with(host=address),
            headers={**headers, "Host": url.netloc.decode(), "Content-Type": "application/json"},
            content=body,
            extensions={"sni_hostname": url.host},
        )
        answer = await http.send(request, stream=True, follow_redirects=False)
        try:
            return _outcome(answer, await _beginning(answer), now_s=self.now())
        finally:
            await answer.aclose()


def _refused_certificate(broken: httpx.ConnectError) -> str:
    """What was wrong with the receiver's certificate; empty where nobody got so far as to look."""
    found: BaseException | None = broken
    while found is not None and not isinstance(found, ssl.SSLCertVerificationError):
        found = found.__cause__ or found.__context__
    if found is None:
        return ""
    allowed = "a public authority's, or one's of EBBTIDE_WEBHOOK_CA_FILE, for that host"
    return f"its certificate is not trusted: {found.verify_message}; allowed: {allowed}"


async def _beginning(answer: httpx.Response) -> bytes:
    """Of the body as it came, which may be packed: so little of it cannot be unpacked into much."""
    read = b""
    async for part in answer.aiter_raw():
        read += part
        if len(read) >= ANSWER_BYTES_MAX:
            break
    return read[:ANSWER_BYTES_MAX]


def _outcome(answer: httpx.Response, beginning: bytes, *, now_s: float) -> Outcome:
    status = answer.status_code
    if answer.is_success:
        return Outcome(status)
    if answer.is_redirect:
        return Outcome(status, f"HTTP {status}: redirects are not followed; give the webhook the URL that answers")
    said = " ".join(beginning.decode("utf-8", "replace").split())[:200]
    return Outcome(status, f"HTTP {status}" + (f": {said}" if said else ""), _retry_after_s(answer, now_s))


def _retry_after_s(answer: httpx.Response, now_s: float) -> float:
    value = answer.headers.get("Retry-After", "")
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    except (ValueError, OverflowError):
        return 0.0
