"""Demands that are made to catch lending out: ten calm days, eight with trouble, two calm ones.

Each demand is (n,) GPUs at five-minute steps, for a pool of `GPUS` GPUs, with 3% of noise on a daily wave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from scheduler.forecast.demand_history import FloatArray, IntArray

GPUS = 128
STEP_S = 300.0
PER_DAY, PER_HOUR = 288, 12
CALM_DAYS, TROUBLED_DAYS, DAYS = 10, 8, 20
HORIZON_BINS = 2

Trouble = Callable[[FloatArray, np.random.Generator], FloatArray]
"""Takes the usual demand of the troubled days, (m,), and returns the one that comes."""


def make_demand(name: str) -> FloatArray:
    """Return the demand with the trouble of this name, (n,)."""
    random = np.random.default_rng(20 + sorted(TROUBLES).index(name))
    hours = np.arange(DAYS * PER_DAY) / PER_HOUR
    wave = 55.0 + 35.0 * np.sin(2 * np.pi * (hours - 8.0) / 24.0)
    demand = wave * np.exp(0.03 * random.standard_normal(len(wave)))
    begin, end = CALM_DAYS * PER_DAY, (CALM_DAYS + TROUBLED_DAYS) * PER_DAY
    demand[begin:end] = TROUBLES[name](demand[begin:end].copy(), random)
    return np.asarray(np.maximum(0.0, demand))


def _spike(demand: FloatArray, starts: IntArray, *, steps: int, gpus: float) -> FloatArray:
    for start in starts.tolist():
        demand[start : start + steps] = gpus
    return demand


def _spikes_at_night(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    """Spike to the whole pool each second night, when most is lent."""
    nights = np.arange(0, TROUBLED_DAYS, 2) * PER_DAY + 2 * PER_HOUR + random.integers(0, PER_HOUR, TROUBLED_DAYS // 2)
    return _spike(demand, nights, steps=3, gpus=0.95 * GPUS)


def _spikes_after_lending(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    """Dip for an hour, so that nodes are lent, then jump to the morning's level, once a day."""
    for start in (np.arange(TROUBLED_DAYS) * PER_DAY + 6 * PER_HOUR).tolist():
        demand[start : start + PER_HOUR] *= 0.3
        demand[start + PER_HOUR : start + 2 * PER_HOUR] = 80.0
    return demand


def _spikes_at_random(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    return _spike(demand, random.integers(0, len(demand) - 6, 8), steps=2, gpus=100.0)


def _sawtooth(period: int) -> Trouble:
    """Rise for `period` steps, and fall at once."""
    return lambda demand, random: np.asarray(20.0 + 60.0 * (np.arange(len(demand)) % period) / max(1, period - 1))


def _square(period: int) -> Trouble:
    return lambda demand, random: np.where(np.arange(len(demand)) // period % 2, 90.0, 25.0)


def _drift(share_per_day: float) -> Trouble:
    return lambda demand, random: np.asarray(demand * (1.0 + share_per_day) ** (np.arange(len(demand)) / PER_DAY))


def _triple_daily(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    """Triple in one interval at one hour of each day, and hold for two hours."""
    for start in (np.arange(TROUBLED_DAYS) * PER_DAY + 3 * PER_HOUR).tolist():
        demand[start : start + 2 * PER_HOUR] *= 3.0
    return demand


def _triple_once(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    demand[3 * PER_HOUR : 6 * PER_HOUR] *= 3.0
    return demand


def _silence(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    """No reading for one hour of each morning. After a longer silence, readings are stale."""
    for start in (np.arange(TROUBLED_DAYS) * PER_DAY + 7 * PER_HOUR).tolist():
        demand[start : start + PER_HOUR] = np.nan
    return demand


def _outage(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    """Zero for three hours, as when the meter fails, then twice the usual demand."""
    demand[: 3 * PER_HOUR] = 0.0
    demand[3 * PER_HOUR : 6 * PER_HOUR] *= 2.0
    return demand


def _level_shift(factor: float) -> Trouble:
    return lambda demand, random: np.asarray(demand * factor)


def _turned_days(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    """Twelve hours late, so that the peak comes when the trough was."""
    return np.roll(demand, PER_DAY // 2)


def _one_hour_early(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    return np.roll(demand, -PER_HOUR)


def _random_walk(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    walk = demand[0] * np.exp(np.cumsum(0.05 * random.standard_normal(len(demand))))
    return np.asarray(np.clip(walk, 5.0, 1.2 * GPUS))


def _heavy_tails(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    return np.asarray(demand * np.exp(0.06 * np.clip(random.standard_t(2.5, len(demand)), -20, 20)))


def _noise(demand: FloatArray, random: np.random.Generator) -> FloatArray:
    return np.asarray(demand * np.exp(0.15 * random.standard_normal(len(demand))))


TROUBLES: Mapping[str, Trouble] = {
    "above the capacity": _level_shift(2.2),
    "drift down": _drift(-0.15),
    "drift up": _drift(0.08),
    "halved": _level_shift(0.5),
    "heavy tails": _heavy_tails,
    "noise": _noise,
    "one hour early": _one_hour_early,
    "outage": _outage,
    "random walk": _random_walk,
    "raised": _level_shift(1.4),
    "sawtooth of four horizons": _sawtooth(4 * HORIZON_BINS),
    "sawtooth of one horizon": _sawtooth(HORIZON_BINS),
    "silence": _silence,
    "spikes after lending": _spikes_after_lending,
    "spikes at night": _spikes_at_night,
    "spikes at random": _spikes_at_random,
    "square wave": _square(9),
    "tripling each night": _triple_daily,
    "tripling once": _triple_once,
    "turned days": _turned_days,
}
