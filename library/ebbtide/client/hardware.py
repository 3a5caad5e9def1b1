"""Client methods for GPU profiles and networks of pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ebbtide.client.methods import ListMethod, RequestMethod
from ebbtide.client.requests import Pages, Request, if_match_headers

if TYPE_CHECKING:
    from ebbtide.client.views import GpuProfileDetailsView, GpuProfileView, PoolView


class HardwareMethods:
    @ListMethod
    def gpu_profiles(self) -> Pages[GpuProfileView]:
        """Return the profiles of all GPU models that the service knows."""
        return Pages("/v1/hardware/gpus")

    @RequestMethod
    def gpu_profile(self, gpu: str) -> Request[GpuProfileDetailsView]:
        return Request("GET", _profile_path(gpu))

    @RequestMethod
    def set_gpu_profile(
        self, gpu: str, profile: Mapping[str, Any], *, if_match: str = ""
    ) -> Request[GpuProfileDetailsView]:
        """Set or replace the profile of a GPU model, as `ebbtide profile` writes it. Plans are solved again."""
        return Request("PUT", _profile_path(gpu), json=profile, headers=if_match_headers(if_match))

    @RequestMethod
    def delete_gpu_profile(self, gpu: str, *, if_match: str = "") -> Request[GpuProfileView]:
        """Delete the profile that was set, and return to the one from before."""
        return Request("DELETE", _profile_path(gpu), headers=if_match_headers(if_match))

    @RequestMethod
    def set_pool_network(self, pool: str, network: Mapping[str, Any], *, if_match: str = "") -> Request[PoolView]:
        """Set the network of a pool from `{bandwidth_bytes_per_s, latency_s, nics_per_node}`.

        `nics_per_node` may be absent and is then 1.
        """
        return Request("PUT", _network_path(pool), json=network, headers=if_match_headers(if_match))

    @RequestMethod
    def delete_pool_network(self, pool: str, *, if_match: str = "") -> Request[PoolView]:
        """Return to the network of the GPU profiles."""
        return Request("DELETE", _network_path(pool), headers=if_match_headers(if_match))


def _profile_path(gpu: str) -> str:
    return f"/v1/hardware/gpus/{quote(gpu, safe='')}"


def _network_path(pool: str) -> str:
    return f"/v1/pools/{quote(pool, safe='')}/network"
