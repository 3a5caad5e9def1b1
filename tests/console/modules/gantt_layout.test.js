// Layout of the Gantt chart: views, lanes, boxes, looks of jobs, and sums by job.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as layout from "../../../api/console/static/gantt_layout.js";

const { COLOURS, LANES_PER_PAGE, PATTERNS, addressOf, jobsOf, lanesOf, lookOf, pageOf, pan, readView, runsOf } = layout;
const { timesOf, zoom } = layout;
const NOW_S = 1_760_000_000;
const HOUR_S = 3600;

function viewOf(text = "") {
  return readView(new URLSearchParams(text));
}

function spanOf(changes) {
  const usual = { number: 1, job_id: "a", name: "train", queue: "web", owner: "ada", generation: 1, node: "t0" };
  const place = { pool: "training", gpu: "h100-80g", gpus: [0, 1], is_lent: false };
  return { ...usual, ...place, begin_s: NOW_S - HOUR_S, end_s: null, end: null, ...changes };
}

const NODES = [
  { name: "t10", pool: "training", gpus: 8 },
  { name: "t2", pool: "training", gpus: 4 },
  { name: "i0", pool: "inference", gpus: 8 },
];

test("an address and its view are inverse, and invalid values are usual ones", () => {
  for (const text of ["last=3600", "last=86400&until=1759990000&pool=a&queue=b&job=c&page=3"]) {
    assert.equal(addressOf(viewOf(text)), `#/gantt?${text}`);
  }
  const usual = { lengthS: 86400, endS: null, pool: "", queue: "", job: "", page: 1 };
  assert.deepEqual(viewOf("last=soon&until=x&page=-2"), usual);
  assert.equal(viewOf("last=1").lengthS, 600);
  assert.equal(viewOf("last=1e12").lengthS, 604800);
});

test("a view follows the present until it moves into the past", () => {
  const view = viewOf("last=3600");
  assert.deepEqual(timesOf(view, NOW_S), [NOW_S - 3600, NOW_S]);
  const earlier = pan(view, -0.5, NOW_S);
  assert.deepEqual(timesOf(earlier, NOW_S), [NOW_S - 5400, NOW_S - 1800]);
  assert.equal(pan(earlier, 0.5, NOW_S).endS, null);
  assert.deepEqual(timesOf(zoom(view, 2, NOW_S), NOW_S), [NOW_S - 7200, NOW_S]);
  assert.deepEqual(timesOf(zoom(earlier, 0.5, NOW_S), NOW_S), [NOW_S - 4500, NOW_S - 2700], "around the middle");
  assert.equal(zoom(view, 1e-9, NOW_S).lengthS, 600);
});

test("lanes are sorted by pool and name, and boxes are shares of the time and of the node", () => {
  const spans = [spanOf({ node: "t2", gpus: [1, 2], begin_s: NOW_S - 2700, end_s: NOW_S - 1800, end: "resized" })];
  const lanes = lanesOf(NODES, spans, [], { view: viewOf("last=3600"), nowS: NOW_S });
  assert.deepEqual(lanes.map((lane) => lane.node.name), ["i0", "t2", "t10"]);
  const [box] = lanes[1].boxes;
  assert.deepEqual([box.from, box.to, box.top, box.height], [0.25, 0.5, 0.25, 0.5]);
  assert.deepEqual(lanes[0].boxes, []);
});

test("boxes end at the edges of the visible time, and what is outside has none", () => {
  const shown = { view: viewOf(`last=3600&until=${NOW_S - 3600}`), nowS: NOW_S };
  const spans = [
    spanOf({ begin_s: NOW_S - 9000 }),
    spanOf({ node: "t2", begin_s: NOW_S - 3600 }),
    spanOf({ node: "t10", begin_s: NOW_S - 9999, end_s: NOW_S - 7201 }),
  ];
  const lanes = new Map(lanesOf(NODES, spans, [], shown).map((lane) => [lane.node.name, lane.boxes]));
  assert.deepEqual([lanes.get("t0").length, lanes.get("t2").length, lanes.get("t10").length], [1, 0, 0]);
  assert.deepEqual([lanes.get("t0")[0].from, lanes.get("t0")[0].to], [0, 1]);
});

test("a filter by queue or job leaves nodes with allocations only", () => {
  const shown = { view: viewOf("last=3600&queue=web"), nowS: NOW_S };
  const lanes = lanesOf(NODES, [spanOf({ node: "i0", pool: "inference" })], [], shown);
  assert.deepEqual(lanes.map((lane) => lane.node.name), ["i0"]);
  const ofPool = lanesOf(NODES, [], [], { view: viewOf("pool=training"), nowS: NOW_S });
  assert.deepEqual(ofPool.map((lane) => lane.node.name), ["t2", "t10"]);
});

test("loans have the periods offered, lent and recalled", () => {
  const loan = { node: "i0", is_live: true, offered_at_s: NOW_S - 3600, lent_at_s: NOW_S - 2700,
    recalled_at_s: NOW_S - 900, state_since_s: NOW_S - 900 };
  const [lane] = lanesOf(NODES, [], [loan], { view: viewOf("last=3600"), nowS: NOW_S });
  assert.deepEqual(lane.loans.map(({ kind, from, to }) => [kind, from, to]), [
    ["offered", 0, 0.25],
    ["lent", 0.25, 0.75],
    ["recalled", 0.75, 1],
  ]);
});

test("GPUs that are not adjacent are several boxes", () => {
  assert.deepEqual(runsOf([0, 1, 2, 5, 7, 8]), [[0, 3], [5, 1], [7, 2]]);
  assert.deepEqual(runsOf([]), []);
});

test("a job always has the same look, and looks are spread evenly", () => {
  const seen = new Map();
  for (let at = 0; at < 2400; at += 1) {
    const look = lookOf(`job-${at}`);
    assert.deepEqual(look, lookOf(`job-${at}`));
    seen.set(String(look), (seen.get(String(look)) ?? 0) + 1);
  }
  assert.equal(seen.size, COLOURS * PATTERNS);
  assert.ok(Math.min(...seen.values()) > 50, "each of the 24 looks has about 100 of 2,400 jobs");
});

test("lanes are divided into pages, and a page beyond the last is the last", () => {
  const lanes = Array.from({ length: LANES_PER_PAGE * 2 + 1 }, (_, at) => at);
  assert.deepEqual(pageOf(lanes, 2).lanes[0], LANES_PER_PAGE);
  const last = pageOf(lanes, 9);
  assert.deepEqual([last.page, last.pages, last.lanes.length], [3, 3, 1]);
  assert.equal(pageOf([], 4).page, 1);
});

test("sums by job count the visible time, and a resize on several nodes once", () => {
  const shown = { view: viewOf("last=3600"), nowS: NOW_S };
  const end = { end_s: NOW_S - 1800, end: "resized" };
  const spans = [
    spanOf({ begin_s: NOW_S - 7200, ...end }),
    spanOf({ node: "t2", is_lent: true, begin_s: NOW_S - 7200, ...end }),
    spanOf({ begin_s: NOW_S - 1800, gpus: [0] }),
    spanOf({ job_id: "b", begin_s: NOW_S - 60 }),
  ];
  const [first, second] = jobsOf(spans, shown);
  assert.deepEqual([first.id, first.gpuS, first.lentGpuS, first.nodes.size], ["a", 2 * 2 * 1800 + 1800, 3600, 2]);
  assert.deepEqual([first.resizedAt.size, first.recalledAt.size, second.gpuS], [1, 0, 120]);
});
