// Logic of the pages about jobs: addresses, saved views, CSV, curves, timelines and logs.

import assert from "node:assert/strict";
import { test } from "node:test";

import { alignCurves, curveOf } from "../../../api/console/static/compare_series.js";
import { csvOf, csvTime } from "../../../api/console/static/csv_text.js";
import { addressOf, DEFAULTS, isFiltered, nextSort, requestOf, wantedOf } from "../../../api/console/static/job_query.js";
import { failedRuns, timelineLanes } from "../../../api/console/static/job_timeline.js";
import { lineMatcher, logText, markedParts } from "../../../api/console/static/log_search.js";
import * as shapes from "../../../api/console/static/plan_shape.js";
import { deleteView, loadViews, saveView } from "../../../api/console/static/saved_views.js";

const { counts, groupsOf, parseSlices, requestOf: planRequestOf, slicesText } = shapes;

test("filters survive their address", () => {
  const wanted = { ...DEFAULTS, state: "", search: "a&b=c", queue: "blue", sort: "-gpus" };
  const address = addressOf(wanted);
  assert.deepEqual(wantedOf(new URLSearchParams(address.split("?")[1])), wanted);
  assert.equal(addressOf(DEFAULTS), "#/jobs");
  assert.deepEqual(wantedOf(new URLSearchParams("")), DEFAULTS);
});

test("by default the list has live jobs and those that failed in the last day", () => {
  const { state, ended_max_age_s: age } = requestOf(DEFAULTS);
  assert.deepEqual([state, age], ["live,failed", 86_400]);
  assert.equal(requestOf({ ...DEFAULTS, state: "failed" }).ended_max_age_s, undefined);
  assert.deepEqual([isFiltered(DEFAULTS), isFiltered({ ...DEFAULTS, sort: "name" })], [false, false]);
  assert.equal(isFiltered({ ...DEFAULTS, search: "x" }), true);
});

test("a second press on a heading turns the order around", () => {
  assert.deepEqual(
    [nextSort("-submitted", "name", false), nextSort("name", "name", false), nextSort("-name", "name", false)],
    ["name", "-name", "name"],
  );
  assert.equal(nextSort("name", "gpus", true), "-gpus");
});

function memory() {
  const values = new Map();
  return { getItem: (key) => values.get(key) ?? null, setItem: (key, value) => values.set(key, value) };
}

test("views are kept by name, and damaged storage is an empty list", () => {
  const storage = memory();
  saveView("jobs", { name: "b", query: "state=" }, storage);
  saveView("jobs", { name: "a", query: "queue=x" }, storage);
  saveView("jobs", { name: "b", query: "state=failed" }, storage);
  const views = [{ name: "a", query: "queue=x" }, { name: "b", query: "state=failed" }];
  assert.deepEqual(loadViews("jobs", storage), views);
  assert.deepEqual(loadViews("nodes", storage), []);
  assert.deepEqual(deleteView("jobs", "a", storage), views.slice(1));
  storage.setItem("ebbtide.views.jobs", "{");
  assert.deepEqual(loadViews("jobs", storage), []);
});

test("CSV quotes texts and disarms formulas", () => {
  const rows = [["a", 'say "x", y', "two\nlines"], ["=1+1", "-2", null], [-2, 0.5, true]];
  assert.equal(csvOf(rows), 'a,"say ""x"", y","two\nlines"\r\n\'=1+1,\'-2,\r\n-2,0.5,true\r\n');
  assert.deepEqual([csvTime(0), csvTime(null)], ["1970-01-01T00:00:00Z", ""]);
});

test("curves share their steps, and repeated steps count once", () => {
  const samples = [{ steps: 1, loss: 5 }, { steps: 2, loss: null }, { steps: 3, loss: 3 }, { steps: 1, loss: 4 }];
  const other = [{ x: 2, y: 9 }];
  assert.deepEqual(alignCurves([curveOf(samples, "loss"), other]), [[1, 2, 3], [4, null, 3], [null, 9, null]]);
  assert.deepEqual(alignCurves([[], []]), [[], [], []]);
});

const STATES = [
  { at_s: 0, state: "queued", message: "" },
  { at_s: 10, state: "starting", message: "" },
  { at_s: 20, state: "running", message: "" },
  { at_s: 60, state: "queued", message: "rank 1 exited with 1 | Traceback | OSError" },
  { at_s: 70, state: "starting", message: "" },
  { at_s: 75, state: "running", message: "" },
  { at_s: 90, state: "preempted", message: "" },
  { at_s: 92, state: "queued", message: "" },
  { at_s: 95, state: "starting", message: "" },
  { at_s: 100, state: "failed", message: "no retry left: out of memory" },
];
const ALLOCATIONS = [
  { at_s: 10, generation: 1, gpus: 8, lent_gpus: 0, plan: "dp8" },
  { at_s: 60, generation: 2, gpus: 0, lent_gpus: 0, plan: null },
  { at_s: 70, generation: 3, gpus: 4, lent_gpus: 4, plan: "dp4" },
  { at_s: 90, generation: 4, gpus: 0, lent_gpus: 0, plan: null },
  { at_s: 95, generation: 5, gpus: 4, lent_gpus: 0, plan: "dp4" },
];

test("failed runs have their cause, run and last lines, and preemptions are none", () => {
  const found = failedRuns(STATES, ALLOCATIONS);
  assert.deepEqual(found.map((run) => [run.atS, run.ranS, run.generation, run.isRetried]), [
    [60, 50, 1, true],
    [100, 5, 5, false],
  ]);
  assert.deepEqual([found[0].cause, found[0].lines], ["rank 1 exited with 1", ["Traceback", "OSError"]]);
});

test("the timeline covers the whole time without gaps in its states", () => {
  const lanes = Object.fromEntries(timelineLanes(STATES, ALLOCATIONS, { endS: 100, hasEnded: true }));
  const states = lanes.State;
  assert.deepEqual([states[0].from, states.at(-1).to], [0, 1]);
  states.slice(1).forEach((span, at) => assert.equal(span.from, states[at].to));
  assert.equal(states.length, STATES.length - 1);
  assert.deepEqual(lanes.GPUs.map((span) => [span.share, span.lentShare]), [[1, 0], [0.5, 0.5], [0.5, 0]]);
  assert.deepEqual(lanes.Plan.map((span) => [span.label, span.fromS, span.toS]), [
    ["dp8", 10, 60],
    ["dp4", 70, 90],
    ["dp4", 95, 100],
  ]);
  assert.deepEqual(timelineLanes([], [], { endS: 1, hasEnded: false }), []);
});

test("log lines are found in any case and marked", () => {
  const line = (text, generation = 1) => ({ text, generation, rank: 0 });
  const matches = lineMatcher(" Error ");
  assert.deepEqual([matches(line("an ERROR here")), matches(line("fine"))], [true, false]);
  assert.equal(lineMatcher("  "), null);
  assert.deepEqual(markedParts("aXbxc", "x"), [["a", false], ["X", true], ["b", false], ["x", true], ["c", false]]);
  assert.equal(logText([line("a"), line("b"), line("c", 2)]), "--- run 1, rank 0\na\nb\n--- run 2, rank 0\nc\n");
});

test("slices of GPUs become nodes", () => {
  const slices = [{ gpu: "a100-80g", gpus: 20 }, { gpu: "h100-80g", gpus: 4 }];
  assert.deepEqual(groupsOf(slices), [
    { gpu: "a100-80g", nodes: 2, gpusPerNode: 8 },
    { gpu: "a100-80g", nodes: 1, gpusPerNode: 4 },
    { gpu: "h100-80g", nodes: 1, gpusPerNode: 4 },
  ]);
  assert.deepEqual(parseSlices(slicesText(slices)), slices);
  assert.deepEqual(parseSlices("a,b:x,:3,c:1"), [{ gpu: "c", gpus: 1 }]);
  assert.deepEqual(planRequestOf({ model: "m", gpu: "a", gpus: 9 }, []), { model: "m", gpu: "a", gpus: 9 });
  assert.equal(planRequestOf({ model: "m", gpu: "a", gpus: 8 }, slices.slice(1)).shape.length, 2);
});

test("a curve has the powers of two between its ends", () => {
  assert.deepEqual([counts(16), counts(12), counts(1), counts(12, 3)],
    [[1, 2, 4, 8, 16], [1, 2, 4, 8, 12], [1], [3, 4, 8, 12]]);
});
