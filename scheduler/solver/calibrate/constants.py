"""The constants of a HardwareProfile that measured runs can tell, and how far a first guess of each may be off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.profile_error import ProfileError


@dataclass(frozen=True, slots=True)
class Constant:
    """`prior_sd`: standard deviation of the logarithm of the true value around that of the given profile.

    The widths are judgement: rates of compute and of links inside a node are known to about a third, a network's and
    what unaligned columns cost to a half, and start-up times depend on the software most of all.
    """

    name: str
    prior_sd: float
    most: float = np.inf
    least: float = 0.0


CONSTANTS = {
    constant.name: constant
    for constant in (
        Constant("efficiency", 0.3, most=1.0),
        Constant("memory_bandwidth_bytes_per_s", 0.3),
        Constant("launch_s", 0.7),
        Constant("intra_bandwidth_bytes_per_s", 0.3),
        Constant("intra_latency_s", 1.0),
        Constant("inter_bandwidth_bytes_per_s", 0.5),
        Constant("inter_latency_s", 0.5),
        Constant("iteration_overhead_s", 1.0),
        Constant("unaligned_slowdown", 0.5, least=1.0),
        Constant("attention_efficiency", 0.3, most=1.0),
        Constant("overlap_coefficient", 0.2, least=1.0),
        Constant("gradient_overlap", 1.0, most=1.0),
        Constant("host_bandwidth_bytes_per_s", 0.5),
        Constant("host_optimizer_s_per_parameter", 0.5),
    )
}
USUAL = tuple(CONSTANTS)[:9]
"""What is fitted unless the caller names others: what every training run depends on."""

_UNITS = {
    "_flops_per_s": "flop/s",
    "_bytes_per_s": "bytes/s",
    "_bytes": "bytes",
    "_s_per_parameter": "s/parameter",
    "_s": "s",
}


def unit_of(name: str) -> str:
    """The unit of a profile's figure, which its name ends with."""
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "ratio")


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The logarithms of some constants around those of a profile: arrays [C], in the order of `names`."""

    names: tuple[str, ...]
    centre: Floats
    prior_sd: Floats
    least: Floats
    most: Floats

    @classmethod
    def of(cls, hardware: HardwareProfile, names: tuple[str, ...] = ()) -> Space:
        """The constants `names`, or the usual ones; of those, the ones that are 0 in `hardware` stay 0.

        Raises:
            ProfileError: a name is unknown, stands there twice, or is 0 in `hardware`.
        """
        for name in names:
            if name not in CONSTANTS:
                raise ProfileError(f"constant {name!r} is unknown; allowed are {', '.join(CONSTANTS)}")
            if names.count(name) > 1:
                raise ProfileError(f"constant {name} is named {names.count(name)} times; allowed is once")
            if not getattr(hardware, name):
                raise ProfileError(f"{name} is 0 in the profile of {hardware.gpu}; it must be above 0 to be fitted")
        chosen = [CONSTANTS[name] for name in names or USUAL if getattr(hardware, name)]
        with np.errstate(divide="ignore"):
            least = np.log([constant.least for constant in chosen])
        return cls(
            names=tuple(constant.name for constant in chosen),
            centre=np.log([getattr(hardware, constant.name) for constant in chosen]),
            prior_sd=np.array([constant.prior_sd for constant in chosen]),
            least=least,
            most=np.log([constant.most for constant in chosen]),
        )

    def applied(self, hardware: HardwareProfile, point: Floats) -> HardwareProfile:
        """`hardware` with the constants at `point`, none beyond its limit by rounding."""
        limited: dict[str, Any] = {}
        for name, value in zip(self.names, np.exp(point).tolist(), strict=True):
            limited[name] = min(max(value, CONSTANTS[name].least), CONSTANTS[name].most)
        return replace(hardware, **limited)
