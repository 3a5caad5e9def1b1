// Data of the capacity timeline.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as data from "../../../api/console/static/capacity_data.js";

const NOW_S = 1000;

/** Returns a history of three bins of 60 s that end now, with a fan. */
function history(changes = {}) {
  const flat = (value) => [value, value, value];
  const pool = {
    name: "serve", kind: "inference", capacity: flat(8), demand: [3, 4, 5], demand_max: [3, 4, 6],
    uses: {
      inference: [3, 4, 5], used: flat(0), lent_used: [4, 2, 0], lent_idle: [0, 2, 0], free: [1, 0, 3], other: flat(0),
      down: flat(0),
    },
    recalls: [0, 0, 2], returns: [1, 0, 0], late_returns: flat(0), short_s: [0, 6, 0],
    fan: { bin_s: 300, quantiles: [0.5, 0.9], at_s: [900, 1200, 90_000], gpus: [[5, 6], [6, 8], [7, 9]] },
    ...changes,
  };
  return { now_s: NOW_S, step_s: 60, at_s: [820, 880, 940], pools: [pool] };
}

test("stacked columns are sums, and null where nothing was observed", () => {
  assert.deepEqual(data.stackColumns([[1, null, 2], [3, null, 0]]), [[1, null, 2], [4, null, 2]]);
  assert.deepEqual(data.stackColumns([]), []);
});

test("the top of the stack is the capacity", () => {
  const past = history();
  const [pool] = past.pools;
  const { values, drawn, now } = data.timelineColumns(past, pool, 3600);
  const uses = data.usesOf(pool);
  assert.deepEqual(uses.map((use) => use.key), ["inference", "lent_used", "lent_idle", "free", "down"]);
  assert.deepEqual(drawn[uses.length].slice(0, 3), pool.capacity);
  assert.deepEqual(values[2].slice(0, 3), pool.uses.lent_used);
  assert.equal(now, 2);
  assert.ok([...values, ...drawn].every((column) => column.length === values[0].length));
});

test("the fan begins with the present demand and ends with the range", () => {
  const past = history();
  const { values } = data.timelineColumns(past, past.pools[0], 3600);
  const median = values.at(-4);
  assert.deepEqual(values[0].slice(3), [NOW_S, 1050, 1350]);
  assert.deepEqual(median, [null, null, null, 5, 5, 6]);
  assert.deepEqual(values[0], [...values[0]].sort((a, b) => a - b));
});

test("a pool without a fan has no times ahead", () => {
  const past = history({ fan: null });
  const { values } = data.timelineColumns(past, past.pools[0], 3600);
  assert.equal(values[0].length, 3);
});

test("uses that occur are drawn whatever the kind of the pool", () => {
  const past = history({ kind: "training" });
  assert.deepEqual(data.usesOf(past.pools[0]).map((use) => use.key),
    ["inference", "used", "lent_used", "lent_idle", "free", "down"]);
});

test("markers of many bins are merged and none is lost", () => {
  const many = 720;
  const ones = Array.from({ length: many }, () => 1);
  const at = ones.map((_, number) => 60 * number);
  const markers = data.markersOf({ step_s: 60, at_s: at }, { recalls: ones, returns: ones, late_returns: ones });
  assert.ok(markers.length <= 60);
  assert.equal(markers.reduce((sum, each) => sum + each.recalls, 0), many);
  assert.deepEqual(data.markersOf(history(), history().pools[0]).map((each) => [each.recalls, each.returns]),
    [[0, 1], [2, 0]]);
});

test("totals are GPU-hours", () => {
  const past = history();
  const totals = data.totalsOf(past, past.pools[0]);
  assert.equal(totals.lentUsed, 6 / 60);
  assert.equal(totals.lentIdle, 2 / 60);
  assert.deepEqual([totals.recalls, totals.late, totals.shortS], [2, 0, 6]);
});

test("range and time are in the address", () => {
  const [hour] = data.RANGES;
  assert.equal(data.hashOf(data.RANGE_DEFAULT, null), "#/");
  assert.equal(data.hashOf(hour, 900.4), "#/?range=1h&at=900");
  assert.equal(data.rangeOf("1h"), hour);
  assert.equal(data.rangeOf("nonsense"), data.RANGE_DEFAULT);
  assert.equal(data.rangeFor(hour, NOW_S - 3000, NOW_S), hour);
  assert.equal(data.rangeFor(hour, NOW_S - 80_000, NOW_S).key, "24h");
  assert.equal(data.rangeFor(data.RANGES[3], NOW_S - 3000, NOW_S).key, "7d");
  assert.equal(data.rangeFor(hour, NOW_S - 1e9, NOW_S).key, "30d");
  assert.equal(data.parseTime("900", NOW_S), 900);
  for (const text of ["", null, "x", "-5", "2000"]) assert.equal(data.parseTime(text, NOW_S), null);
});

test("a time belongs to one bin", () => {
  const past = history();
  assert.deepEqual([0, 820, 879, 880, NOW_S].map((atS) => data.binAt(past, atS)), [0, 0, 0, 1, 2]);
});

test("the slider has about 200 positions of whole minutes", () => {
  for (const range of data.RANGES) {
    const stepS = data.sliderStepS(range.seconds);
    assert.equal(stepS % 60, 0);
    assert.ok(range.seconds / stepS <= 220);
  }
});
