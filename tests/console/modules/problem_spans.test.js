// Problems over time.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as spans from "../../../api/console/static/problem_spans.js";

const DOWN = {
  code: "NodeDown", severity: "warning", kind: "node", subject: "i0", pool: "serve", cause: "Node i0 is down.",
  begin_s: 100, end_s: 160, duration_s: 60, times: 1, ending: "The node is up again.", settled: true,
};
const NOW_S = 1000;

test("marks of a pool are its problems and those of the service, the most severe last", () => {
  const resolved = [
    { ...DOWN, kind: "service", pool: "", severity: "critical", begin_s: 50, end_s: 70 },
    DOWN, { ...DOWN, pool: "train" }, { ...DOWN, kind: "job", pool: "" },
  ];
  const present = { code: "DemandStale", severity: "notice", kind: "pool", pool: "serve", since_s: 900 };
  const items = [present, { ...present, since_s: null }, { ...present, pool: "train" }];
  assert.deepEqual(spans.spansOf({ items, resolved }, "serve", NOW_S), [
    { beginS: 900, endS: NOW_S, severity: "notice" },
    { beginS: NOW_S, endS: NOW_S, severity: "notice" },
    { beginS: 100, endS: 160, severity: "warning" },
    { beginS: 50, endS: 70, severity: "critical" },
  ]);
  assert.deepEqual(spans.spansOf({ items: [], resolved: [] }, "serve", NOW_S), []);
});

test("a problem that came and went has a count", () => {
  assert.equal(spans.extentOf(DOWN), "1 min");
  assert.equal(spans.extentOf({ ...DOWN, duration_s: 1980, times: 3 }), "33 min, 3 times");
});

test("an unknown period is the first one", () => {
  assert.equal(spans.periodOf("7d").seconds, 604_800);
  assert.equal(spans.periodOf("x"), spans.PERIODS[0]);
});
