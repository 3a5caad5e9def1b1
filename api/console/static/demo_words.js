// Texts of the demo's controls.

import { plural } from "./format.js";

const MINUTES_A_DAY = 1440;

/**
 * @typedef {{now_s: number, started_at_s: number | null, day_s: number, surged_at_s: number | null,
 * surge_until_s: number | null, surge_gpus: Record<string, number>}} DemoDay
 * @typedef {{asked_at_s: number, return_by_s: number, returned_at_s: number | null, outcome: string | null}} Receipt
 */

/**
 * Returns the share of the replayed day that has passed, from 0 to 1.
 * @param {DemoDay} day
 */
export function passedShare(day) {
  if (day.started_at_s === null) return 0;
  return Math.min(1, Math.max(0, (day.now_s - day.started_at_s) / day.day_s));
}

/**
 * Returns the time of the replayed day, such as 14:20.
 * @param {DemoDay} day
 */
export function dayTime(day) {
  const minutes = Math.floor(passedShare(day) * MINUTES_A_DAY);
  const pad = (/** @type {number} */ number) => String(number).padStart(2, "0");
  return `${pad(Math.floor(minutes / 60))}:${pad(minutes % 60)}`;
}

/**
 * Returns the seconds until the surge ends, 0 without one.
 * @param {DemoDay} day
 */
export function surgeLeftS(day) {
  return day.surge_until_s === null ? 0 : Math.max(0, day.surge_until_s - day.now_s);
}

/**
 * Describes what the last surge did to the lent nodes. Empty without a surge.
 * @param {DemoDay} day
 * @param {Receipt[]} receipts of recalls that were made since the surge began
 */
export function surgeSentence(day, receipts) {
  if (day.surged_at_s === null) return "";
  const until = day.surge_until_s ?? day.surged_at_s;
  const recalled = receipts.filter((each) => each.asked_at_s <= until);
  if (!recalled.length) return surgeLeftS(day) ? "Demand has risen. No node is recalled yet." : "";
  const returned = recalled.filter((each) => each.returned_at_s !== null);
  const late = recalled.filter((each) => each.outcome === "late").length;
  const margins = returned.map((each) => each.return_by_s - (each.returned_at_s ?? 0));
  const closest = margins.length ? `, the closest ${Math.min(...margins).toFixed(1)} s before its deadline` : "";
  return `${plural(recalled.length, "node")} recalled, ${returned.length} returned${closest}, ${late} late.`;
}
