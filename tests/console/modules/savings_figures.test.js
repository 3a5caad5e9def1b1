// Figures of the savings page: sums, bars of days, ticks, and comparisons.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as figures from "../../../api/console/static/savings_figures.js";

const { addressOf, barsOf, hoursOf, readChoice, shortenings, ticksOf, toHours } = figures;
const DAY_S = 86400;
const FROM_S = 20_000 * DAY_S;

function sums(changes = {}) {
  const held = { gpu_s: 7200, own_gpu_s: 3600, lent_gpu_s: 3600, lost_gpu_s: 0.5 };
  return { ...held, lent_idle_gpu_s: 1200, idle_waiting_gpu_s: 1800, ...changes };
}

test("choices come from the address, and unknown ones are usual ones", () => {
  assert.deepEqual(readChoice(new URLSearchParams("days=7&by=gpu")), { days: 7, by: "gpu" });
  assert.equal(readChoice(new URLSearchParams("by=model")).by, "model");
  assert.deepEqual(readChoice(new URLSearchParams("days=8&by=colour")), { days: 30, by: "queue" });
  assert.equal(addressOf({ days: 90, by: "owner" }), "#/savings?days=90&by=owner");
});

test("lent GPU time is what jobs held on loan and what was idle on loan", () => {
  const hours = hoursOf(sums());
  assert.deepEqual([hours.lent, hours.recovered, hours.lost], [4800 / 3600, 1, 0]);
  assert.equal(hours.recoveredShare, 0.75);
  const unknown = hoursOf(sums({ lent_idle_gpu_s: null, idle_waiting_gpu_s: null }));
  assert.deepEqual([unknown.lent, unknown.idleWaiting, unknown.recoveredShare], [null, null, null]);
  assert.deepEqual([toHours(1e-6), toHours(null), toHours(3600)], [0, null, 1]);
});

test("every day of the period has a bar", () => {
  const bars = barsOf([{ day: FROM_S + DAY_S, ...sums() }], FROM_S + 3600, FROM_S + 3 * DAY_S);
  assert.deepEqual(bars.map((bar) => (bar.dayS - FROM_S) / DAY_S), [0, 1, 2]);
  assert.deepEqual(bars[1].parts, [1, 1, 1200 / 3600]);
  assert.deepEqual([bars[1].idleWaiting, bars[0].parts], [0.5, [0, 0, 0]]);
});

test("empty days at the start are left out, but a week remains", () => {
  const first = (at, days) => barsOf([{ day: FROM_S + at * DAY_S, ...sums() }], FROM_S, FROM_S + days * DAY_S)[0].dayS;
  assert.deepEqual([first(5, 30), first(28, 30), first(0, 30)].map((dayS) => (dayS - FROM_S) / DAY_S), [5, 23, 0]);
  assert.equal(barsOf([], FROM_S, FROM_S + 3 * DAY_S).length, 3);
});

test("ticks are round and reach the largest value", () => {
  for (const most of [0.003, 0.9, 1, 7, 42, 99, 1234, 1e6]) {
    const ticks = ticksOf(most);
    assert.equal(ticks[0], 0);
    assert.ok(ticks.at(-1) >= most && ticks.at(-1) <= 2.6 * most, `${most}: ${ticks}`);
    assert.ok(ticks.length >= 3 && ticks.length <= 5, `${most}: ${ticks}`);
  }
  assert.deepEqual(ticksOf(0), [0, 1]);
});

test("a completion time is compared with that of each other variant", () => {
  const outcome = (variant, jct_mean_s) => ({ variant, jct_mean_s });
  const outcomes = [outcome("today", 75), outcome("no_lending", 100), outcome("no_elasticity", 50)];
  assert.deepEqual(shortenings(outcomes), [
    { variant: "no_lending", share: 0.25 },
    { variant: "no_elasticity", share: -0.5 },
  ]);
});
