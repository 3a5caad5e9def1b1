// Pipeline schedules: each pass once, in a possible order, as long as theory says.

import assert from "node:assert/strict";
import { test } from "node:test";

import { passOrder, scheduleOf, timePasses } from "../../../api/console/static/pipeline_schedule.js";

const SCHEDULES = [
  { name: "gpipe", interleave: 1 },
  { name: "1f1b", interleave: 1 },
  { name: "interleaved-1f1b", interleave: 2 },
  { name: "interleaved-1f1b", interleave: 3 },
];
const cases = SCHEDULES.flatMap((schedule) => [1, 2, 4].flatMap((devices) => [1, 2, 4, 7, 8].map((micro) => (
  [schedule, devices, micro]
))));

function timed(schedule, devices, micro, handOverS = 0) {
  return timePasses(passOrder(schedule, devices, micro), {
    forwardS: Array(devices).fill(1),
    backwardS: Array(devices).fill(2),
    handOverS: Array(devices - 1).fill(handOverS),
    chunks: schedule.interleave,
  });
}

test("every pass runs once, and no device runs two at a time", () => {
  for (const [schedule, devices, micro] of cases) {
    const { passes } = timed(schedule, devices, micro, 0.1);
    const keys = passes.map((pass) => `${pass.device} ${pass.kind} ${pass.chunk} ${pass.micro}`);
    assert.equal(new Set(keys).size, 2 * devices * micro * schedule.interleave);
    for (let device = 0; device < devices; device += 1) {
      const own = passes.filter((pass) => pass.device === device).sort((a, b) => a.fromS - b.fromS);
      own.slice(1).forEach((pass, at) => assert.ok(pass.fromS >= own[at].toS - 1e-9));
    }
  }
});

test("a pass begins after the pass of the stage before it and its hand-over", () => {
  for (const [schedule, devices, micro] of cases) {
    const { passes } = timed(schedule, devices, micro, 0.25);
    const last = devices * schedule.interleave - 1;
    const find = (kind, stage, number) => passes.find((pass) => (
      pass.kind === kind && pass.chunk * devices + pass.device === stage && pass.micro === number
    ));
    for (const pass of passes) {
      const stage = pass.chunk * devices + pass.device;
      const before = pass.kind === "forward" ? stage - 1 : stage + 1;
      if (before < 0) continue;
      const source = before > last ? find("forward", stage, pass.micro) : find(pass.kind, before, pass.micro);
      const linkS = source.device === pass.device ? 0 : 0.25;
      assert.ok(pass.fromS >= source.toS + linkS - 1e-9);
    }
  }
});

test("the step lasts as long as theory says for equal stages", () => {
  for (const [devices, micro] of [[2, 4], [4, 4], [4, 8]]) {
    for (const schedule of SCHEDULES) {
      const bubble = (devices - 1) * 3 / schedule.interleave;
      assert.ok(Math.abs(timed(schedule, devices, micro).endS - (3 * micro + bubble)) < 1e-9, schedule.name);
    }
  }
});

test("1F1B holds at most as many micro-batches as stages follow", () => {
  const order = passOrder({ name: "1f1b", interleave: 1 }, 4, 8);
  order.forEach((passes, device) => {
    let held = 0;
    let most = 0;
    for (const pass of passes) {
      held += pass.kind === "forward" ? 1 : -1;
      most = Math.max(most, held);
    }
    assert.equal(most, 4 - device);
  });
});

test("a circular order is an error", () => {
  const passes = [{ kind: "backward", micro: 0, chunk: 0 }, { kind: "forward", micro: 0, chunk: 0 }];
  const times = { forwardS: [1], backwardS: [1], handOverS: [], chunks: 1 };
  assert.throws(() => timePasses([passes], times), /circular/);
});

test("the schedule of a plan includes what follows the passes", () => {
  const device = { compute_s: 6, tensor_s: 0, sequence_s: 0, expert_s: 0, data_s: 0.5, other_s: 0.25 };
  const stage = { strategies: [{ recompute: "none" }] };
  const plan = { micro_batches: 2, schedule: { name: "1f1b", interleave: 1 }, stages: [stage, stage] };
  const { endS, wholeS, ends } = scheduleOf(plan, { devices: [device, device], hand_overs_s: [0] });
  assert.equal(endS, 9);
  assert.equal(wholeS, 9.75);
  assert.equal(ends.length, 2);
});
