// Problems over time: marks on the timeline of a pool, and the entries of resolved ones. No document, so that tests run
// in Node.

import { duration, plural } from "./format.js";

/**
 * @typedef {{code: string, severity: string, kind: string, subject: string, pool: string, cause: string,
 * begin_s: number, end_s: number, duration_s: number, times: number, ending: string, settled: boolean}} Resolved
 * @typedef {{code: string, severity: string, kind: string, pool: string, since_s: number | null}} Present
 * @typedef {{beginS: number, endS: number, severity: string}} Span
 */

const RANKS = { notice: 0, warning: 1, critical: 2 };

/** The times for which resolved problems are listed. */
export const PERIODS = [
  { key: "24h", name: "24 h", seconds: 86_400 },
  { key: "7d", name: "7 d", seconds: 604_800 },
  { key: "30d", name: "30 d", seconds: 2_592_000 },
];

/** Returns the period of a key, or the first one. */
export function periodOf(key) {
  return PERIODS.find((period) => period.key === key) ?? PERIODS[0];
}

/**
 * Returns the spans to mark on the timeline of a pool, the least severe first, so that the others are drawn over them.
 * Problems of the whole service belong to every pool. A present one without a begin is marked at its end only.
 * @param {{items: Present[], resolved: Resolved[]}} problems
 * @param {string} pool
 * @param {number} nowS
 * @returns {Span[]}
 */
export function spansOf({ items, resolved }, pool, nowS) {
  const concerns = (each) => each.pool === pool || each.kind === "service";
  const ended = resolved.filter(concerns).map((each) => spanOf(each.begin_s, each.end_s, each));
  const present = items.filter(concerns).map((each) => spanOf(each.since_s ?? nowS, nowS, each));
  const spans = [...ended, ...present];
  return spans.sort((one, other) => RANKS[one.severity] - RANKS[other.severity]);
}

function spanOf(beginS, endS, { severity }) {
  return { beginS, endS, severity };
}

/**
 * Says how long a resolved problem lasted: "33 min", or "33 min, 3 times".
 * @param {Resolved} problem
 */
export function extentOf({ duration_s: durationS, times }) {
  const text = duration(Math.round(durationS));
  return times > 1 ? `${text}, ${plural(times, "time")}` : text;
}
