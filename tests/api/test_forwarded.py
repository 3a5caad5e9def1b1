"""The client's address behind reverse proxies, and who is throttled by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.forwarded import ForwardedClient, TrustedProxies, parse_forwarded
from scheduler.domain.worker_token import issue_agent_token
from scheduler.settings import Settings
from tests.api.authenticated_service import AuthenticatedService
from tests.api.conftest import SECRET, Problem

PROXIES = TrustedProxies.parse("10.0.0.0/8, 2001:db8::1, 127.0.0.1")
CLIENT = "198.51.100.7"


def find_client(peer: str, **headers: str) -> ForwardedClient | None:
    return PROXIES.find_client(
        peer, [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    )


@pytest.mark.parametrize(
    ("forwarded", "expected"),
    [
        ("for=198.51.100.7", ForwardedClient(CLIENT)),
        ("for=1.1.1.1, for=198.51.100.7", ForwardedClient(CLIENT)),
        ("for=198.51.100.7, For=10.1.2.3", ForwardedClient(CLIENT)),
        ('for="198.51.100.7:4711";proto=https;host="a.example"', ForwardedClient(CLIENT, "https", "a.example")),
        ('for="[2001:db8::9]:80";by=x', ForwardedClient("2001:db8::9")),
        ("for=1.1.1.1, for=unknown;proto=https", ForwardedClient("10.0.0.9", "https")),
        ("for=1.1.1.1, for=_hidden, for=10.1.2.3", ForwardedClient("10.1.2.3")),
        ('for="1.1.1.1, for=198.51.100.7', ForwardedClient(CLIENT)),
        ('for="1.1.1.1, for="[2001:db8::9]"', ForwardedClient("2001:db8::9")),
        ("for=10.1.1.1, for=10.2.2.2", ForwardedClient("10.1.1.1")),
        ("nonsense", ForwardedClient("10.0.0.9")),
        ("for=198.51.100.7;host=a b;proto=gopher", ForwardedClient("10.0.0.9")),
    ],
)
def test_the_rightmost_untrusted_address_is_the_client(forwarded: str, expected: ForwardedClient) -> None:
    assert find_client("10.0.0.9", forwarded=forwarded) == expected


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("198.51.100.7", CLIENT),
        ("1.1.1.1, 198.51.100.7", CLIENT),
        ("1.1.1.1, 198.51.100.7, 10.4.4.4, 2001:db8::1", CLIENT),
        ("1.1.1.1, evil, 10.4.4.4", "10.4.4.4"),
        ("2001:db8::9", "2001:db8::9"),
    ],
)
def test_x_forwarded_for_is_read_from_the_right(addresses: str, expected: str) -> None:
    found = find_client("127.0.0.1", x_forwarded_for=addresses, x_forwarded_proto="https", x_forwarded_host="a.example")
    assert found == ForwardedClient(expected, "https", "a.example")


def test_headers_that_disagree_or_come_from_strangers_do_not_count() -> None:
    assert find_client("10.0.0.9", forwarded="for=1.1.1.1", x_forwarded_for=CLIENT) is None
    assert find_client("10.0.0.9", forwarded=f"for={CLIENT}", x_forwarded_for=CLIENT) == ForwardedClient(CLIENT)
    assert find_client("192.0.2.1", forwarded="for=1.1.1.1") is None
    assert TrustedProxies().find_client("127.0.0.1", [(b"x-forwarded-for", b"1.1.1.1")]) is None


@given(
    st.text(alphabet='for=1.2;,:"\\[] \tproto', max_size=60),
    st.sampled_from(["for=198.51.100.7", "For=198.51.100.7;proto=http"]),
)
def test_what_a_client_sends_cannot_hide_what_the_proxy_appends(sent: str, appended: str) -> None:
    assert parse_forwarded(f"{sent}, {appended}")[-1].address == CLIENT


def test_invalid_proxies_are_refused() -> None:
    for value in ("proxy.example", "10.0.0.1/8", "10.0.0.0/33", "*"):
        with pytest.raises(ValueError, match="accepted: 10"):
            Settings(trusted_proxies=value)


def test_a_valid_token_is_not_throttled_by_address(problem: Problem) -> None:
    with (guarded := AuthenticatedService(rate_burst=3, rate_per_s=0.001)).http:
        for number in range(4):
            guarded.request("GET", "/v1/whoami", f"ebk_guess{number}")
        problem(guarded.request("GET", "/v1/whoami", "ebk_guess"), 429)
        assert guarded.request("GET", "/v1/whoami", guarded.root).status_code == 200, "never seen before"


def test_valid_agent_tokens_are_not_throttled_by_address(problem: Problem) -> None:
    with (guarded := AuthenticatedService(rate_burst=2, rate_per_s=0.001)).http:
        statement = {"pod": "p", "address": "10.1.0.2"}
        for number in range(2):
            problem(guarded.request("POST", "/v1/jobs/train/agents/t0", f"eba_guess{number}", statement), 403)
        problem(guarded.request("POST", "/v1/jobs/train/agents/t0", "eba_guess", statement), 429)
        problem(guarded.request("POST", "/v1/machines/m0/report", "ebm_guess", {}), 429)
        token = issue_agent_token(SECRET, "train")
        problem(guarded.request("POST", "/v1/jobs/train/agents/t0", token, statement), 404)
        problem(guarded.request("POST", "/v1/jobs/other/agents/t0", token, statement), 429)


def test_failures_are_counted_by_the_address_that_a_trusted_proxy_names(problem: Problem) -> None:
    with (guarded := AuthenticatedService(rate_burst=1, rate_per_s=0.001, trusted_proxies="127.0.0.1")).http:

        def fail(address: str) -> int:
            return guarded.http.get("/v1/jobs", headers={"X-Forwarded-For": f"9.9.9.9, {address}"}).status_code

        assert [fail("1.1.1.1"), fail("1.1.1.1"), fail("2.2.2.2"), fail("1.1.1.1")] == [401, 429, 401, 429]
    with (guarded := AuthenticatedService(rate_burst=1, rate_per_s=0.001)).http:
        assert [fail("1.1.1.1"), fail("2.2.2.2")] == [401, 429], "without the setting the headers are ignored"
