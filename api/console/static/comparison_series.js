// Daily comparisons of savings as lines over days. Pure, without a document.

const HOUR_S = 3600;
const DAY_S = 86400;

/** Variants: [name, value in the API, custom property of the colour, dashes of the line]. */
export const VARIANTS = /** @type {[string, string, string, number[]][]} */ ([
  ["As today", "today", "training", []],
  ["Without lending", "no_lending", "recalled", [8, 4]],
  ["Without elasticity", "no_elasticity", "inference", [3, 3]],
]);

/** Figures to choose from: [name, unit, value of an outcome]. */
export const FIGURES = /** @type {[string, string, (outcome: any) => number][]} */ ([
  ["Mean completion time", "hours", (each) => each.jct_mean_s / HOUR_S],
  ["Mean wait for GPUs", "hours", (each) => each.waiting_mean_s / HOUR_S],
  ["Idle while jobs waited", "GPU-hours", (each) => each.idle_waiting_gpu_hours],
  ["Work lost", "GPU-hours", (each) => each.lost_gpu_hours],
]);

/**
 * @typedef {{days: number[], states: string[], lines: (number | null)[][]}} Series `lines` in the order of VARIANTS,
 * with null where a day has no result
 */

/**
 * @param {any[]} items days of the API, oldest first
 * @param {(outcome: any) => number} valueOf
 * @returns {Series}
 */
export function seriesOf(items, valueOf) {
  const valuesOf = (variant) => items.map((item) => {
    const found = item.outcomes.find((each) => each.variant === variant);
    return found ? valueOf(found) : null;
  });
  return {
    days: items.map((item) => item.day),
    states: items.map((item) => item.state),
    lines: VARIANTS.map(([, variant]) => valuesOf(variant)),
  };
}

/**
 * Returns the newest day that ended in a failure, if no later one has succeeded.
 * @param {any[]} items days of the API, oldest first
 */
export function standingFailure(items) {
  const ended = items.filter((item) => item.state === "succeeded" || item.state === "failed");
  const newest = ended.at(-1);
  return newest?.state === "failed" ? newest : null;
}

/** Returns the largest value of all lines, or 0. */
export function largestOf(lines) {
  return Math.max(0, ...lines.flat().filter((value) => value !== null));
}

/**
 * Returns the runs of consecutive days with values: arrays of [position, value].
 * @param {(number | null)[]} line
 */
export function runsOf(line) {
  const runs = [];
  line.forEach((value, at) => {
    if (value === null) return;
    if (at > 0 && line[at - 1] !== null) runs.at(-1).push([at, value]);
    else runs.push([[at, value]]);
  });
  return runs;
}

/**
 * Returns the share of the width at which a day is drawn, 0 to 1. The first day is at the left edge.
 * @param {number[]} days
 * @param {number} at
 */
export function positionOf(days, at) {
  const wholeS = Math.max(days.at(-1) - days[0], DAY_S);
  return (days[at] - days[0]) / wholeS;
}
