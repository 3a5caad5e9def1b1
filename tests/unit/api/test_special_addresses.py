"""The table of special-purpose addresses, and every way to write a private IPv4 address as IPv6."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.webhooks.special_addresses import (
    BLOCKS,
    Address,
    AddressBlock,
    Reach,
    find_block,
    is_public,
    is_public_address,
)

PRIVATE_V4 = [
    block.network
    for block in BLOCKS
    if isinstance(block.network, ipaddress.IPv4Network) and block.reach is Reach.PRIVATE
]
EMBEDDINGS: dict[str, Callable[[int], int]] = {
    "compatible": lambda v4: v4,
    "mapped": lambda v4: (0xFFFF << 32) | v4,
    "translated": lambda v4: (0xFFFF << 48) | v4,
    "nat64": lambda v4: (0x64FF9B << 96) | v4,
    "local-nat64": lambda v4: (0x64FF9B0001 << 80) | v4,
    "6to4": lambda v4: (0x2002 << 112) | (v4 << 80) | 1,
    "teredo-client": lambda v4: (0x20010000 << 96) | (0x08080808 << 64) | (v4 ^ 0xFFFFFFFF),
    "teredo-server": lambda v4: (0x20010000 << 96) | (v4 << 64) | (0x08080808 ^ 0xFFFFFFFF),
}


def draw_address(data: st.DataObject, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> Address:
    return network[data.draw(st.integers(0, network.num_addresses - 1))]


@given(data=st.data(), block=st.sampled_from(BLOCKS))
def test_an_address_follows_the_most_specific_block(data: st.DataObject, block: AddressBlock) -> None:
    address = draw_address(data, block.network)
    found = find_block(address)
    assert found is not None
    assert found.network.prefixlen == max(each.network.prefixlen for each in BLOCKS if address in each.network)
    if found.reach is not Reach.EMBEDDED:
        assert is_public_address(address) == (found.reach is Reach.PUBLIC)


@given(data=st.data(), network=st.sampled_from(PRIVATE_V4), form=st.sampled_from(sorted(EMBEDDINGS)))
def test_private_addresses_stay_private_in_every_ipv6_form(
    data: st.DataObject, network: ipaddress.IPv4Network, form: str
) -> None:
    v4 = draw_address(data, network)
    if is_public_address(v4):
        return  # an exception within the block, such as 192.0.0.9
    v6 = ipaddress.IPv6Address(EMBEDDINGS[form](int(v4)))
    assert not is_public(str(v4))
    assert not is_public(str(v6)), v6.exploded


@given(st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address))
def test_no_accepted_ipv4_address_is_private_to_the_standard_library(address: ipaddress.IPv4Address) -> None:
    if is_public_address(address) and find_block(address) is None:
        assert address.is_global
        assert not any((address.is_private, address.is_multicast, address.is_reserved, address.is_loopback))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1", "no address"),
        *("64:ff9b:1::808:808", "::127.0.0.1", "::808:808", "fec0::1", "2002:a00:1::", "2001:db8::1", "3fff::1"),
        *("5f00::1", "100::1", "100:0:0:1::1", "192.88.99.1", "2001:2::1", "2001:10::1", "ff0e::1", "4000::1"),
        *("2606:4700::1111%eth0", "127.1", "0x7f000001", "2130706433", "localhost", ""),
    ],
)
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "192.0.0.9", "2606:2800:220:1::1", "64:ff9b::5db8:d822", "::ffff:8.8.8.8", "2002:808:808::1"],
)
def test_internet_addresses_are_public(address: str) -> None:
    assert is_public(address)
