// Daily comparisons as lines: values by variant, gaps, and the failure that still stands.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as series from "../../../api/console/static/comparison_series.js";

const { FIGURES, largestOf, positionOf, runsOf, seriesOf, standingFailure } = series;
const DAY_S = 86400;

function outcomes(hours) {
  return ["no_elasticity", "today", "no_lending"].map((variant, at) => ({ variant, jct_mean_s: 3600 * (hours + at) }));
}

function day(at, state, found = []) {
  return { day: at * DAY_S, state, outcomes: found, reason: "" };
}

test("lines follow the variants, with gaps where a day has no result", () => {
  const items = [day(0, "succeeded", outcomes(1)), day(1, "missing"), day(2, "succeeded", outcomes(4))];
  const { days, states, lines } = seriesOf(items, FIGURES[0][2]);
  assert.deepEqual(days, [0, DAY_S, 2 * DAY_S]);
  assert.deepEqual(states, ["succeeded", "missing", "succeeded"]);
  assert.deepEqual(lines, [[2, null, 5], [3, null, 6], [1, null, 4]]);
  assert.equal(largestOf(lines), 6);
  assert.deepEqual(runsOf(lines[0]), [[[0, 2]], [[2, 5]]]);
  assert.deepEqual([largestOf([]), runsOf([null])], [0, []]);
});

test("days are placed by their time", () => {
  assert.deepEqual([0, 1, 2].map((at) => positionOf([0, DAY_S, 4 * DAY_S], at)), [0, 0.25, 1]);
  assert.equal(positionOf([5 * DAY_S], 0), 0);
});

test("a failure stands until a later day succeeds", () => {
  const failed = day(1, "failed");
  assert.equal(standingFailure([day(0, "succeeded"), failed, day(2, "skipped"), day(3, "running")]), failed);
  assert.equal(standingFailure([failed, day(2, "succeeded")]), null);
  assert.equal(standingFailure([]), null);
});
