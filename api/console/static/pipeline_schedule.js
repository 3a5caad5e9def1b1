// Order and times of a pipeline's forward and backward passes under GPipe, 1F1B and interleaved 1F1B. Pure.
//
// Orders: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503) and its interleaved form (Megatron-LM,
// arXiv 2104.04473, section 2.2).

/**
 * @typedef {{kind: "forward" | "backward", micro: number, chunk: number}} Pass
 * @typedef {Pass & {device: number, fromS: number, toS: number}} TimedPass
 */

/**
 * Returns the order of passes of each device.
 * @param {{name: string, interleave: number}} schedule
 * @param {number} devices
 * @param {number} microBatches
 * @returns {Pass[][]}
 */
export function passOrder({ name, interleave }, devices, microBatches) {
  return Array.from({ length: devices }, (_, device) => {
    const forwards = passesOf("forward", devices, microBatches, interleave);
    const backwards = passesOf("backward", devices, microBatches, interleave);
    const total = forwards.length;
    const ahead = Math.min(total, forwardsAhead(name, interleave, { devices, device, total }));
    const alternating = forwards.slice(ahead).flatMap((pass, at) => [pass, backwards[at]]);
    return [...forwards.slice(0, ahead), ...alternating, ...backwards.slice(total - ahead)];
  });
}

/** Forward passes of a device before its first backward pass. */
function forwardsAhead(name, interleave, { devices, device, total }) {
  if (name === "gpipe") return total;
  if (interleave > 1) return 2 * (devices - device - 1) + (interleave - 1) * devices;
  return devices - device - 1;
}

/** Passes of one kind in order: with chunks, groups of as many micro-batches as devices run through all chunks. */
function passesOf(kind, devices, microBatches, chunks) {
  const size = chunks > 1 ? devices : microBatches;
  const passes = [];
  for (let first = 0; first < microBatches; first += size) {
    for (let turn = 0; turn < chunks; turn += 1) {
      const chunk = kind === "forward" ? turn : chunks - 1 - turn;
      const end = Math.min(first + size, microBatches);
      for (let micro = first; micro < end; micro += 1) passes.push({ kind, micro, chunk });
    }
  }
  return passes;
}

/**
 * Returns the times of all passes. A forward pass waits for the one of the previous stage, and a backward pass for
 * that of the next stage; the first backward pass waits for its own forward pass.
 * @param {Pass[][]} order of each device
 * @param {{forwardS: number[], backwardS: number[], handOverS: number[], chunks: number}} times of a pass by device,
 * and of one hand-over by link
 * @returns {{passes: TimedPass[], endS: number}}
 */
export function timePasses(order, { forwardS, backwardS, handOverS, chunks }) {
  const devices = order.length;
  const last = devices * chunks - 1;
  const endOf = new Map(); // by kind, stage and micro-batch
  const next = order.map(() => 0);
  const freeS = order.map(() => 0);
  const passes = [];
  const key = (kind, stage, micro) => `${kind} ${stage} ${micro}`;
  const linkS = (from, to) => (from === to ? 0 : handOverS[Math.min(from, to)] ?? handOverS.at(-1) ?? 0);
  const readyS = ({ kind, micro, chunk }, device) => {
    const stage = chunk * devices + device;
    const before = kind === "forward" ? stage - 1 : stage + 1;
    if (before < 0) return 0;
    if (before > last) return endOf.get(key("forward", stage, micro));
    const end = endOf.get(key(kind, before, micro));
    return end === undefined ? undefined : end + linkS(before % devices, device);
  };
  for (let isMoving = true; isMoving; ) {
    isMoving = false;
    for (let device = 0; device < devices; device += 1) {
      for (let pass = order[device][next[device]]; pass; pass = order[device][next[device]]) {
        const ready = readyS(pass, device);
        if (ready === undefined) break;
        const fromS = Math.max(ready, freeS[device]);
        const toS = fromS + (pass.kind === "forward" ? forwardS : backwardS)[device] / chunks;
        endOf.set(key(pass.kind, pass.chunk * devices + device, pass.micro), toS);
        passes.push({ ...pass, device, fromS, toS });
        freeS[device] = toS;
        next[device] += 1;
        isMoving = true;
      }
    }
  }
  if (passes.length < order.reduce((sum, each) => sum + each.length, 0)) {
    throw new Error("The order of passes is circular: a pass waits for one that comes after it.");
  }
  return { passes, endS: Math.max(0, ...freeS) };
}

const FORWARD_SHARE = 1 / 3; // a backward pass computes twice as much as a forward pass
const RECOMPUTED_FORWARD_SHARE = 1 / 4; // and once more if it recomputes the forward pass

/**
 * Returns the timed schedule of a plan, and when each device is done with the rest of its step: data-parallel
 * communication, optimizer and host overhead.
 * @param {any} plan
 * @param {any} inspection
 */
export function scheduleOf(plan, inspection) {
  const devices = inspection.devices.length;
  const { micro_batches: microBatches, schedule } = plan;
  const busyS = inspection.devices.map((each) => {
    return (each.compute_s + each.tensor_s + each.sequence_s + each.expert_s) / microBatches;
  });
  const shares = inspection.devices.map((_, at) => {
    const isRecomputed = plan.stages[at].strategies.some((strategy) => strategy.recompute === "full");
    return isRecomputed ? RECOMPUTED_FORWARD_SHARE : FORWARD_SHARE;
  });
  const timed = timePasses(passOrder(schedule, devices, microBatches), {
    forwardS: busyS.map((each, at) => each * shares[at]),
    backwardS: busyS.map((each, at) => each * (1 - shares[at])),
    handOverS: inspection.hand_overs_s.map((each) => each / (2 * microBatches * schedule.interleave)),
    chunks: schedule.interleave,
  });
  const restS = inspection.devices.map((each) => each.data_s + each.other_s);
  const lastS = inspection.devices.map((_, at) => timed.passes.filter((pass) => pass.device === at).at(-1).toS);
  const ends = lastS.map((each, at) => ({ fromS: each, toS: each + restS[at] }));
  return { ...timed, ends, wholeS: Math.max(...ends.map((each) => each.toS)) };
}
