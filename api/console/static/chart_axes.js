// Axes of charts: formats of x values, and ticks of durations, days and logarithmic scales.

import { duration, figure, tickTimes, time } from "./format.js";

const DAY_S = 86_400;
const DURATIONS_S = [
  1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 4 * 3600, 6 * 3600, 12 * 3600, DAY_S, 2 * DAY_S, 7 * DAY_S,
  14 * DAY_S, 30 * DAY_S, 60 * DAY_S, 180 * DAY_S, 360 * DAY_S,
];
const LOG_DURATIONS_S = [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, DAY_S, 7 * DAY_S, 30 * DAY_S, 180 * DAY_S];
const DAYS_S = [1, 2, 7, 14, 28].map((days) => days * DAY_S);
export const SYMLOG_FROM = 10; // values from here on are logarithmic
const LOG_PAD = 1.06;
const TICK_PX = 64; // width of the longest tick label that is not a time
const TIME_PX = 76;
const TICK_LINE_PX = 26; // distance of ticks of the y axis
const dayOfMonth = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

/** Formats a day (UTC): 5 Oct. */
export function day(atS) {
  return dayOfMonth.format(new Date(1000 * atS));
}

/**
 * Returns the label of the x axis, and functions that format one x and all ticks.
 * @param {import("../types/charts").ChartSpec} spec
 */
export function xOf({ xs = "time", xFormat = "number" }) {
  if (xs === "time") return { label: "Time", format: (x) => time(x), ticks: tickTimes, stepPx: TIME_PX };
  const format = { number: figure, duration, day }[xFormat];
  const ticks = (xs) => xs.map((x) => (x === null ? "" : x === 0 ? "0" : format(x)));
  return { label: xs, format, ticks, stepPx: TICK_PX };
}

/**
 * Returns the ticks of the x axis for uPlot: steps of a linear axis, or a function for a logarithmic one.
 * @param {import("../types/charts").ChartSpec} spec
 */
export function xTicks({ xFormat, xScale }) {
  if (xScale === "log") {
    const ticks = xFormat === "duration" ? logDurations : powersOfTwo;
    return { splits: (plot, _, low, high) => ticks(low, high, plot.width / TICK_PX), filter: (_, all) => all };
  }
  if (xFormat === "duration") return { incrs: DURATIONS_S };
  return xFormat === "day" ? { incrs: DAYS_S } : {};
}

/**
 * Returns the ticks of the y axis for uPlot.
 * @param {import("../types/charts").ChartSpec} spec
 */
export function yTicks({ yScale }) {
  if (yScale !== "log" && yScale !== "symlog") return {};
  const ticks = yScale === "symlog" ? symlogTicks : decadeTicks;
  return { splits: (plot, _, low, high) => ticks(low, high, plot.height / TICK_LINE_PX), filter: (_, all) => all };
}

/** Returns at most `most` round durations in a range. */
export function logDurations(low, high, most) {
  const inRange = (durations) => durations.filter((each) => each >= low && each <= high);
  const coarse = inRange(LOG_DURATIONS_S);
  return thin(coarse.length > 2 ? coarse : inRange(DURATIONS_S), most);
}

/** Returns at most `most` powers of two in a range. */
export function powersOfTwo(low, high, most) {
  const powers = [];
  for (let power = Math.ceil(Math.log2(low)); 2 ** power <= high; power += 1) powers.push(2 ** power);
  return thin(powers, most);
}

/** Returns at most `most` ticks in a range above zero: 1, 2, 5, 10 and so on, or fewer a decade. */
export function decadeTicks(low, high, most) {
  const first = Math.floor(Math.log10(low));
  const decades = Array.from({ length: Math.ceil(Math.log10(high)) - first + 1 }, (_, at) => 10 ** (first + at));
  const inRange = (factors) => decades.flatMap((decade) => factors.map((factor) => factor * decade))
    .filter((each) => each >= low && each <= high);
  return [[1, 2, 5], [1, 3]].map(inRange).find((ticks) => ticks.length <= most) ?? thin(inRange([1]), most);
}

/** Returns at most `most` ticks from zero: 0, 5, 10, 20, 50, 100 and so on, or fewer a decade. */
export function symlogTicks(_low, high, most) {
  return [0, SYMLOG_FROM / 2, ...decadeTicks(SYMLOG_FROM, high, most - 2)];
}

/** Keeps every n-th value, including the last. */
function thin(values, most) {
  const every = Math.max(1, Math.ceil(values.length / Math.max(1, most)));
  return values.filter((_, at) => (values.length - 1 - at) % every === 0);
}

/**
 * Returns the x range of all data.
 * @param {import("../types/charts").ChartSpec} spec
 * @param {number | null} low
 * @param {number | null} high
 * @returns {[number, number]}
 */
export function xRange({ xScale }, low, high) {
  return xScale === "log" ? [(low ?? 1) / LOG_PAD, (high ?? 2) * LOG_PAD] : [low, high];
}

/**
 * Returns the range of the y axis: from zero, or the range of the values with padding.
 * @param {import("../types/charts").ChartSpec} spec
 * @param {number | null} low
 * @param {number | null} high
 * @returns {[number, number]}
 */
export function yRange({ fromZero = true, yScale = "linear", headroom = 1.08 }, low, high) {
  if (yScale === "log") return low === null ? [1, 2] : [low / 1.3, high * 1.3];
  if (fromZero || low === null) return [Math.min(0, low ?? 0), (high || 1) * headroom];
  const pad = 0.08 * (high - low || Math.abs(high) || 1);
  return [low - pad, high + pad];
}

/**
 * Returns uPlot's scales.
 * @param {import("../types/charts").ChartSpec} spec
 */
export function distributions({ xScale, yScale }) {
  const kinds = { log: { distr: 3, log: 10 }, symlog: { distr: 4, asinh: SYMLOG_FROM } };
  return { x: kinds[xScale] ?? {}, y: kinds[yScale] ?? {} };
}
