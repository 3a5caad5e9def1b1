// Charts of simulations, safety reports and scaling curves, and the ticks of their axes.

import assert from "node:assert/strict";
import { test } from "node:test";
import { decadeTicks, logDurations, powersOfTwo, symlogTicks, xRange, yRange } from "../../../api/console/static/chart_axes.js";
import { curveChart } from "../../../api/console/static/plan_curve_chart.js";
import { safetyCharts } from "../../../api/console/static/safety_charts.js";
import {
  completionRange, groupMeans, shareWithin, shownEndS, simulationCharts,
} from "../../../api/console/static/simulation_charts.js";

const filled = (value, length = 12) => Array.from({ length }, () => value);

function series(more = {}) {
  return {
    policy: "fifo", step_s: 60, submitting_s: 300, inference_gpus: 16, inference_nodes: 2, queued_jobs: filled(1),
    training_usage_ratio: filled(0.5), inference_usage_ratio: filled(0.25), lent_nodes: filled(0), demand_gpus: filled(4),
    forecast_gpus: filled(8), jct_s: [10, 100, 1000], ...more,
  };
}

const titles = (...all) => simulationCharts(all.map((each) => ({ label: each.policy, series: each }))).map(({ title }) => title);
const chartOf = (title, ...all) => {
  return simulationCharts(all.map((each) => ({ label: each.policy, series: each }))).find((each) => each.title === title);
};

test("charts without data are left out", () => {
  const inference = "Useful work of inference pools";
  assert.deepEqual(titles(series()), ["Pending jobs", "Useful work of training pools", inference, "Completion times"]);
  assert.deepEqual(titles(series({ lent_nodes: filled(1), jct_s: [] })).slice(2), [inference, "Nodes on loan"]);
  assert.deepEqual(titles(series({ inference_nodes: 0, jct_s: [7] })), ["Pending jobs", "Useful work of training pools"]);
});

test("series of different steps share one column of times", () => {
  const fine = series({ queued_jobs: [1, 3, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0] });
  const coarse = series({ step_s: 120, queued_jobs: [2, 4, 6, 6] });
  const { data: [xs, first, second], span } = chartOf("Pending jobs", fine, coarse);
  assert.deepEqual(xs, [60, 180, 300, 420]);
  assert.deepEqual(first, [2, 6, 0, 0]);
  assert.deepEqual(second, [2, 4, 6, 6]);
  assert.deepEqual(span, [0, 480]);
});

test("the time axis ends after the last submission, or when no job is pending", () => {
  const waits = (count) => series({ queued_jobs: [...filled(2, count), ...filled(0, 12 - count)] });
  assert.equal(shownEndS([waits(2), waits(1)]), 309);
  assert.equal(shownEndS([waits(2), waits(8)]), 480);
  assert.equal(shownEndS([series({ submitting_s: 0 })]), 720);
  assert.deepEqual(chartOf("Pending jobs", waits(8)).spec.marks.map((mark) => mark.x), [300]);
});

test("nodes idle by demand follow from the GPUs, and never drop below zero", () => {
  const { data, spec } = chartOf("Nodes on loan", series({ lent_nodes: filled(1), forecast_gpus: filled(20) }));
  assert.deepEqual(data.slice(1).map((column) => column[0]), [1.5, 0, 1]);
  assert.deepEqual(spec.series.map(({ label }) => label), ["Idle by demand", "Idle by forecast", "fifo"]);
});

test("long queues have a logarithmic axis, long traces daily means", () => {
  assert.equal(chartOf("Pending jobs", series()).spec.yScale, "linear");
  assert.equal(chartOf("Pending jobs", series({ queued_jobs: filled(51) })).spec.yScale, "symlog");
  const month = { step_s: 7200, submitting_s: 0, queued_jobs: filled(1, 360), training_usage_ratio: filled(1, 360) };
  const { data: [xs], caption } = chartOf("Useful work of training pools", series(month));
  assert.deepEqual([xs.length, xs[0], xs[1]], [30, 43_200, 129_600]);
  assert.match(caption, /Daily/);
});

test("shares of completed jobs rise from the first to the last completion", () => {
  assert.deepEqual([5, 10, 55, 100, 1000, 2000].map((x) => shareWithin([10, 100, 1000], x)), [0, 0, 0.25, 0.5, 1, 1]);
  assert.equal(shareWithin([5, 5, 5], 5), 1);
  const { data: [xs, shares] } = chartOf("Completion times", series());
  assert.deepEqual([xs[0], shares[0], shares.at(-1)], [10, 0, 100]);
  assert.deepEqual(completionRange([[10, 20], [5, 1000]]), [5, 1000]);
  assert.deepEqual(completionRange([[160, 160]]).map(Math.round), [51, 506]);
  assert.ok(shares.every((share, at) => at === 0 || share >= shares[at - 1]));
});

test("a group of means covers the rest of the values", () => {
  assert.deepEqual(groupMeans([1, 3, 5], 2), [2, 5]);
  assert.deepEqual(groupMeans([1, 3, 5], 1), [1, 3, 5]);
});

test("a safety report has a value for each day, and no chart without records", () => {
  const day = (number, ratio) => ({
    start_s: 86_400 * number, lent_gpu_hours: 8, recalls: 1, deadline_ratio_max: ratio, short_intervals: 0,
  });
  const [lent, returns, short] = safetyCharts({ daily: [day(1, 0.5), day(2, null)] });
  assert.deepEqual(lent.data, [[86_400, 172_800], [8, 8]]);
  assert.deepEqual(returns.data.slice(1), [[50, null], [100, 100], [1, 1]]);
  assert.deepEqual([short.span[0], short.span[1]], [43_200, 216_000]);
  assert.deepEqual(safetyCharts({ daily: [] }), []);
});

test("a scaling curve marks plans that fewer GPUs match", () => {
  const points = [
    { gpus: 1, infeasible: "out of memory" },
    { gpus: 2, samples_per_s: 4 },
    { gpus: 3, samples_per_s: 6 },
    { gpus: 4, samples_per_s: 6 },
  ];
  assert.deepEqual(curveChart(points).data, [[2, 3, 4], [4, 6, 6], [4, 6, 8], [null, null, 6]]);
  assert.deepEqual(curveChart([]).data, [[], [], [], []]);
});

test("ticks are round, in the range, and few", () => {
  assert.deepEqual(logDurations(5, 4000, 9), [10, 60, 600, 3600]);
  assert.deepEqual(logDurations(5, 4000, 2), [60, 3600]);
  assert.deepEqual(logDurations(50, 500, 9), [60, 120, 300]);
  assert.deepEqual(powersOfTwo(3, 70, 9), [4, 8, 16, 32, 64]);
  assert.deepEqual(decadeTicks(1, 30, 9), [1, 2, 5, 10, 20]);
  assert.deepEqual(decadeTicks(1, 30_000, 6), [1, 10, 100, 1000, 10_000]);
  assert.deepEqual(symlogTicks(0, 60, 9), [0, 5, 10, 20, 50]);
  assert.ok(symlogTicks(0, 1e6, 6).length <= 6);
});

test("ranges leave room for points and begin at zero where asked", () => {
  assert.deepEqual(xRange({ label: "", series: [] }, 1, 8), [1, 8]);
  const [low, high] = xRange({ label: "", series: [], xScale: "log" }, 4, 4);
  assert.ok(low < 4 && high > 4);
  assert.deepEqual(yRange({ label: "", series: [], headroom: 1 }, 3, 8), [0, 8]);
  assert.deepEqual(yRange({ label: "", series: [], yScale: "log" }, null, null), [1, 2]);
  const [bottom, top] = yRange({ label: "", series: [], fromZero: false }, 3, 8);
  assert.ok(bottom < 3 && bottom > 2 && top > 8 && top < 9);
});
