// Data of the capacity timeline: stacked columns, the forecast fan, markers and the times of the slider.

/**
 * A time range. `aheadS` is how much of the forecast the charts show.
 * @typedef {{key: string, name: string, seconds: number, aheadS: number}} Range
 * @typedef {{key: string, label: string, colour: string}} Use
 */

/** @type {Range[]} */
export const RANGES = [
  { key: "1h", name: "1 h", seconds: 3600, aheadS: 1800 },
  { key: "6h", name: "6 h", seconds: 21_600, aheadS: 10_800 },
  { key: "24h", name: "24 h", seconds: 86_400, aheadS: 86_400 },
  { key: "7d", name: "7 d", seconds: 604_800, aheadS: 86_400 },
  { key: "30d", name: "30 d", seconds: 2_592_000, aheadS: 86_400 },
];
export const RANGE_DEFAULT = RANGES[1];

/** @type {Use[]} Uses from the bottom of the stack to its top. */
const USES = [
  { key: "inference", label: "Inference", colour: "use-inference" },
  { key: "used", label: "Training", colour: "use-used" },
  { key: "lent_used", label: "Lent, used", colour: "use-lent-used" },
  { key: "lent_idle", label: "Lent, idle", colour: "use-lent-idle" },
  { key: "other", label: "Others", colour: "use-other" },
  { key: "free", label: "Free", colour: "use-free" },
  { key: "down", label: "Down", colour: "use-down" },
];
const MARKERS_MAX = 60;
const ALWAYS = {
  inference: ["inference", "lent_used", "lent_idle", "free", "down"],
  training: ["used", "free", "down"],
};

/** Returns the range of a key in the address, or the default. */
export function rangeOf(key) {
  return RANGES.find((range) => range.key === key) ?? RANGE_DEFAULT;
}

/** Returns the shortest range from `range` on that reaches back to a time. */
export function rangeFor(range, atS, nowS) {
  const wider = RANGES.slice(RANGES.indexOf(range));
  return wider.find((each) => nowS - atS <= each.seconds) ?? wider.at(-1);
}

/** Returns the uses to draw for a pool: those of its kind, and others that occur. */
export function usesOf(pool) {
  const occurs = (use) => pool.uses[use.key].some((value) => value > 0);
  return USES.filter((use) => ALWAYS[pool.kind].includes(use.key) || occurs(use));
}

/** Returns the cumulative sums of columns, each with those before it. Null where the column is null. */
export function stackColumns(columns) {
  const sums = columns[0]?.map(() => 0) ?? [];
  return columns.map((column) =>
    column.map((value, at) => {
      if (value === null) return null;
      sums[at] += value;
      return sums[at];
    }));
}

/**
 * Returns the chart's columns: x, each use, capacity, demand, one per quantile of the fan, recalled and returned nodes.
 * `drawn` has the stacked uses instead of `values`. `now` is the index of the newest observed bin.
 */
export function timelineColumns(history, pool, aheadS) {
  const untilS = history.now_s + aheadS;
  const past = history.at_s.map((atS) => Math.min(atS + history.step_s / 2, history.now_s));
  const fan = fanPoints(history, pool, untilS);
  const blank = fan.xs.map(() => null);
  const none = past.map(() => null);
  const uses = usesOf(pool).map((use) => pool.uses[use.key]);
  const widen = (column) => [...column, ...blank];
  const rest = [
    widen(pool.capacity),
    widen(pool.demand),
    ...fan.columns.map((column) => [...none, ...column]),
    widen(pool.recalls),
    widen(pool.returns),
  ];
  const xs = [...past, ...fan.xs];
  return {
    values: [xs, ...uses.map(widen), ...rest],
    drawn: [xs, ...stackColumns(uses).map(widen), ...rest],
    now: pool.capacity.findLastIndex((value) => value !== null),
  };
}

/** Returns the fan from now on. It begins with the present demand, so that it joins the line of demand. */
function fanPoints(history, pool, untilS) {
  const { fan } = pool;
  if (!fan) return { xs: [], columns: [] };
  const shown = fan.at_s.flatMap((atS, at) => {
    const middleS = atS + fan.bin_s / 2;
    return middleS > history.now_s && middleS <= untilS ? [[middleS, fan.gpus[at]]] : [];
  });
  const present = pool.demand.findLast((value) => value !== null);
  if (present !== undefined) shown.unshift([history.now_s, fan.quantiles.map(() => present)]);
  return {
    xs: shown.map(([atS]) => atS),
    columns: fan.quantiles.map((_, level) => shown.map(([, gpus]) => gpus[level])),
  };
}

/**
 * Returns when nodes were recalled or returned: {atS, recalls, returns, late}. Neighbouring bins that cannot be drawn
 * apart are one marker.
 */
export function markersOf(history, pool) {
  const width = Math.ceil(history.at_s.length / MARKERS_MAX);
  const markers = [];
  for (let first = 0; first < history.at_s.length; first += width) {
    const sum = (column) => column.slice(first, first + width).reduce((total, value) => total + value, 0);
    const [recalls, returns, late] = [sum(pool.recalls), sum(pool.returns), sum(pool.late_returns)];
    const atS = history.at_s[first] + (width * history.step_s) / 2;
    if (recalls || returns) markers.push({ atS, recalls, returns, late });
  }
  return markers;
}

/** Returns what happened in the shown time as figures: GPU-hours lent, used and idle, recalls, late returns. */
export function totalsOf(history, pool) {
  const hours = history.step_s / 3600;
  const sum = (column) => column.reduce((total, value) => total + (value ?? 0), 0);
  return {
    lentUsed: hours * sum(pool.uses.lent_used),
    lentIdle: hours * sum(pool.uses.lent_idle),
    used: hours * sum(pool.uses.used),
    capacity: hours * sum(pool.capacity),
    recalls: sum(pool.recalls),
    late: sum(pool.late_returns),
    shortS: sum(pool.short_s),
  };
}

/** Returns the index of the bin that contains a time, or of the first bin. */
export function binAt(history, atS) {
  return Math.max(0, history.at_s.findLastIndex((beginS) => beginS <= atS));
}

/** Returns the seconds between two positions of the slider: 200 positions, but whole minutes. */
export function sliderStepS(seconds) {
  return Math.max(60, Math.round(seconds / 200 / 60) * 60);
}

/** Returns the time in the address as seconds, or null for the present. */
export function parseTime(text, nowS) {
  const atS = Number(text);
  return text && Number.isFinite(atS) && atS > 0 && atS < nowS ? atS : null;
}

/** Returns the hash of the page for a time range and a past time; null is the present. */
export function hashOf(range, atS) {
  const query = new URLSearchParams();
  if (range !== RANGE_DEFAULT) query.set("range", range.key);
  if (atS !== null) query.set("at", String(Math.round(atS)));
  const text = query.toString();
  return text ? `#/?${text}` : "#/";
}
