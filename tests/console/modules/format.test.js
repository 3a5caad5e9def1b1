// Formats of numbers, times and sizes.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as formats from "../../../api/console/static/format.js";

const { bytes, duration, figure, gpus, gpuTime, percent, plural, range, words } = formats;

test("durations have at most two units", () => {
  const cases = [
    [null, "–"],
    [0, "0 s"],
    [0.32, "320 ms"],
    [1.25, "1.25 s"],
    [59.7, "1 min"],
    [3599.6, "1 h"],
    [90_061, "1 d 1 h"],
    [-90, "−1 min 30 s"],
  ];
  for (const [seconds, text] of cases) assert.equal(duration(seconds), text);
});

test("shares near the ends keep their digits", () => {
  assert.deepEqual([0, 0.0013, 0.5, 0.9994, 1, null].map(percent), ["0%", "0.13%", "50%", "99.94%", "100%", "–"]);
});

test("counts agree with their units", () => {
  assert.deepEqual([gpus(1), gpus(12_000)], ["1 GPU", "12,000 GPUs"]);
  assert.deepEqual([plural(1, "node"), plural(2, "node")], ["1 node", "2 nodes"]);
  assert.deepEqual([range(4, 4), range(1, 4)], ["4", "1–4"]);
});

test("large and tiny values stay readable", () => {
  assert.deepEqual([12_345.6, 1.23456, 1e-6, NaN].map(figure), ["12,346", "1.23", "1.00e-6", "–"]);
  assert.deepEqual([bytes(512), bytes(1536), bytes(80 * 2 ** 30)], ["512 B", "1.5 KiB", "80 GiB"]);
  assert.deepEqual([gpuTime(30), gpuTime(5400)], ["30 GPU-seconds", "1.5 GPU-hours"]);
});

test("codes become words", () => {
  assert.deepEqual([words("JobGrown"), words("NodeLent"), words("JobNeedsGpus")], ["Grown", "Node lent", "Needs GPUs"]);
});
