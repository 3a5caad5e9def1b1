// Figures of the savings page, without a document: sums in GPU-hours, stacks of the chart, and comparisons.

const HOUR_S = 3600;
const DAY_S = 86400;
const BARS_MIN = 7;
/** @type {[string, number][]} */
export const PERIODS = [["7 days", 7], ["30 days", 30], ["90 days", 90], ["1 year", 365]];
/** @type {[string, string][]} */
export const DIMENSIONS = [["Queue", "queue"], ["Owner", "owner"], ["GPU model", "gpu"], ["Model trained", "model"],
  ["Day", "day"]];

/** Parts of a bar, from below: [name, custom property of the colour, GPU-seconds of a row]. */
export const PARTS = /** @type {[string, string, (row: any) => number][]} */ ([
  ["Used on own nodes", "training", (row) => row.own_gpu_s],
  ["Used on loan", "lent", (row) => row.lent_gpu_s],
  ["Lent and idle", "idle", (row) => row.lent_idle_gpu_s ?? 0],
]);

/** @param {URLSearchParams} query */
export function readChoice(query) {
  const days = Number(query.get("days"));
  const by = query.get("by");
  return {
    days: PERIODS.some(([, value]) => value === days) ? days : 30,
    by: DIMENSIONS.some(([, value]) => value === by) ? by : "queue",
  };
}

export function addressOf({ days, by }) {
  return `#/savings?${new URLSearchParams({ days: String(days), by })}`;
}

/**
 * Returns GPU-hours; less than a GPU-second is 0, because sums of real numbers leave such remainders.
 * @param {number | null} gpuS
 */
export function toHours(gpuS) {
  if (gpuS === null) return null;
  return Math.abs(gpuS) < 1 ? 0 : gpuS / HOUR_S;
}

/** Returns the sums of a report in GPU-hours, null where they are not known. */
export function hoursOf(sums) {
  const lentGpuS = sums.lent_idle_gpu_s === null ? null : sums.lent_gpu_s + sums.lent_idle_gpu_s;
  return {
    used: toHours(sums.gpu_s),
    lent: toHours(lentGpuS),
    recovered: toHours(sums.lent_gpu_s),
    lost: toHours(sums.lost_gpu_s),
    idleWaiting: toHours(sums.idle_waiting_gpu_s),
    recoveredShare: lentGpuS ? sums.lent_gpu_s / lentGpuS : null,
  };
}

/**
 * Returns one bar for each day of the period, also for days without a row. Values are GPU-hours.
 * Empty days at the start are left out, down to BARS_MIN bars.
 * @param {any[]} items rows by day
 * @param {number} fromS
 * @param {number} toS
 */
export function barsOf(items, fromS, toS) {
  const byDay = new Map(items.map((row) => [row.day, row]));
  const bars = [];
  for (let dayS = Math.floor(fromS / DAY_S) * DAY_S; dayS < toS; dayS += DAY_S) {
    const row = byDay.get(dayS);
    bars.push({
      dayS,
      parts: PARTS.map(([, , of]) => (row ? toHours(of(row)) : 0)),
      idleWaiting: row ? toHours(row.idle_waiting_gpu_s ?? 0) : 0,
    });
  }
  const first = bars.findIndex((bar) => bar.idleWaiting > 0 || bar.parts.some((part) => part > 0));
  return bars.slice(Math.max(0, Math.min(first, bars.length - BARS_MIN)));
}

/**
 * Returns round values for the axis from 0 to at least `most`.
 * @param {number} most
 */
export function ticksOf(most) {
  if (!(most > 0)) return [0, 1];
  const power = 10 ** Math.floor(Math.log10(most / 4));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each * 4 >= most) ?? 10 * power;
  return [0, 1, 2, 3, 4].map((at) => at * step).filter((value, at, all) => at === 0 || all[at - 1] < most);
}

/**
 * Returns how much shorter the mean completion time is than under each other variant, as a share of the longer one.
 * @param {any[]} outcomes of a comparison
 */
export function shortenings(outcomes) {
  const today = outcomes.find((each) => each.variant === "today");
  return outcomes.filter((each) => each !== today && each.jct_mean_s > 0).map((each) => ({
    variant: each.variant,
    share: 1 - today.jct_mean_s / each.jct_mean_s,
  }));
}
