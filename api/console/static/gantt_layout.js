// Layout of the Gantt chart, without a document: the visible time, lanes of nodes, and boxes of allocations.

export const LENGTHS = /** @type {[string, number][]} */ ([
  ["1 h", 3600],
  ["6 h", 21600],
  ["24 h", 86400],
  ["3 d", 259200],
  ["7 d", 604800],
]);
export const LANES_PER_PAGE = 100;
export const COLOURS = 8;
export const PATTERNS = 3;
const LENGTH_MIN_S = 600;
const LENGTH_MAX_S = 604800;
const LENGTH_USUAL_S = 86400;
const byName = new Intl.Collator("en", { numeric: true });

/**
 * The visible time and the filters. `endS` is null while the view follows the present.
 * @typedef {{lengthS: number, endS: number | null, pool: string, queue: string, job: string, page: number}} View
 * @typedef {{number: number, job_id: string, name: string | null, queue: string | null, owner: string | null,
 * generation: number | null, node: string, pool: string, gpu: string, gpus: number[], is_lent: boolean,
 * begin_s: number, end_s: number | null, end: string | null}} Span
 * @typedef {{name: string, pool: string, gpus: number}} FleetNode
 * @typedef {{span: Span, from: number, to: number, top: number, height: number}} Box
 * @typedef {{node: FleetNode, boxes: Box[], loans: {kind: string, from: number, to: number, loan: any}[]}} Lane
 */

/**
 * @param {URLSearchParams} query
 * @returns {View}
 */
export function readView(query) {
  const number = (name, usual) => (Number.isFinite(Number(query.get(name) || NaN)) ? Number(query.get(name)) : usual);
  return {
    lengthS: clamp(number("last", LENGTH_USUAL_S), LENGTH_MIN_S, LENGTH_MAX_S),
    endS: number("until", null),
    pool: query.get("pool") ?? "",
    queue: query.get("queue") ?? "",
    job: query.get("job") ?? "",
    page: Math.max(1, Math.floor(number("page", 1))),
  };
}

/**
 * Returns the address of a view, without what is usual.
 * @param {View} view
 */
export function addressOf(view) {
  const given = new URLSearchParams({ last: String(Math.round(view.lengthS)) });
  if (view.endS !== null) given.set("until", String(Math.round(view.endS)));
  for (const name of ["pool", "queue", "job"]) if (view[name]) given.set(name, view[name]);
  if (view.page > 1) given.set("page", String(view.page));
  return `#/gantt?${given}`;
}

/**
 * Returns the visible time as [from, to].
 * @param {View} view
 * @param {number} nowS
 * @returns {[number, number]}
 */
export function timesOf(view, nowS) {
  const toS = view.endS ?? nowS;
  return [toS - view.lengthS, toS];
}

/**
 * Zooms around the middle, or around the present while the view follows it. A factor below 1 shows less time.
 * @param {View} view
 * @param {number} factor
 * @param {number} nowS
 */
export function zoom(view, factor, nowS) {
  const lengthS = clamp(view.lengthS * factor, LENGTH_MIN_S, LENGTH_MAX_S);
  const grownS = (lengthS - view.lengthS) / 2;
  return until({ ...view, lengthS }, view.endS === null ? null : view.endS + grownS, nowS);
}

/**
 * Moves the view by a share of its length; negative: into the past.
 * @param {View} view
 * @param {number} share
 * @param {number} nowS
 */
export function pan(view, share, nowS) {
  return until(view, (view.endS ?? nowS) + share * view.lengthS, nowS);
}

function until(view, endS, nowS) {
  return { ...view, endS: endS === null || endS >= nowS ? null : Math.max(endS, view.lengthS) };
}

/**
 * Returns one lane for each node, by pool and name. With a filter by queue or job, only nodes with allocations remain.
 * @param {FleetNode[]} nodes
 * @param {Span[]} spans
 * @param {any[]} loans
 * @param {{view: View, nowS: number}} shown
 * @returns {Lane[]}
 */
export function lanesOf(nodes, spans, loans, { view, nowS }) {
  const [fromS, toS] = timesOf(view, nowS);
  const known = new Map(nodes.map((node) => [node.name, node]));
  /** @type {Map<string, Lane>} */
  const lanes = new Map();
  const laneOf = (name, pool, gpus) => {
    const node = known.get(name) ?? { name, pool, gpus }; // a node that has left the fleet
    if (!lanes.has(name)) lanes.set(name, { node, boxes: [], loans: [] });
    const lane = lanes.get(name);
    lane.node = known.has(name) ? node : { ...node, gpus: Math.max(lane.node.gpus, gpus) };
    return lane;
  };
  if (!view.queue && !view.job) {
    for (const node of nodes) if (!view.pool || node.pool === view.pool) laneOf(node.name, node.pool, node.gpus);
  }
  for (const span of spans) {
    const at = sharesOf(span.begin_s, span.end_s ?? nowS, fromS, toS);
    if (at) laneOf(span.node, span.pool, span.gpus.at(-1) + 1).boxes.push(...boxesOf(span, at));
  }
  for (const lane of lanes.values()) {
    for (const box of lane.boxes) {
      box.top /= lane.node.gpus;
      box.height /= lane.node.gpus;
    }
  }
  for (const loan of loans) lanes.get(loan.node)?.loans.push(...loanPeriods(loan, fromS, toS, nowS));
  const order = (a, b) => byName.compare(a.node.pool, b.node.pool) || byName.compare(a.node.name, b.node.name);
  return [...lanes.values()].sort(order);
}

/** One box for each run of adjacent GPUs, with `top` and `height` in GPUs. */
function boxesOf(span, [from, to]) {
  return runsOf(span.gpus).map(([first, count]) => ({ span, from, to, top: first, height: count }));
}

/**
 * Returns runs of adjacent indices as [first, count].
 * @param {number[]} indices
 * @returns {[number, number][]}
 */
export function runsOf(indices) {
  const runs = /** @type {[number, number][]} */ ([]);
  for (const index of indices) {
    const last = runs.at(-1);
    if (last && last[0] + last[1] === index) last[1] += 1;
    else runs.push([index, 1]);
  }
  return runs;
}

/** Returns the periods in which the node was offered, lent and recalled. */
function loanPeriods(loan, fromS, toS, nowS) {
  const endS = loan.is_live ? nowS : loan.state_since_s;
  const recalledS = loan.recalled_at_s ?? endS;
  const lentS = loan.lent_at_s ?? (loan.is_live ? endS : loan.offered_at_s);
  const periods = [["offered", loan.offered_at_s, lentS], ["lent", lentS, recalledS], ["recalled", recalledS, endS]];
  return periods.flatMap(([kind, beginS, untilS]) => {
    const at = untilS > beginS && sharesOf(beginS, untilS, fromS, toS);
    return at ? [{ kind, from: at[0], to: at[1], loan }] : [];
  });
}

/**
 * Returns a period as shares of the visible time, or null if it is not visible.
 * @returns {[number, number] | null}
 */
function sharesOf(beginS, endS, fromS, toS) {
  if (endS < fromS || beginS >= toS) return null;
  const share = (atS) => clamp((atS - fromS) / (toS - fromS), 0, 1);
  return [share(beginS), share(endS)];
}

/**
 * Returns a page of lanes, and how many pages there are.
 * @param {Lane[]} lanes
 * @param {number} page
 */
export function pageOf(lanes, page) {
  const pages = Math.max(1, Math.ceil(lanes.length / LANES_PER_PAGE));
  const shown = Math.min(page, pages);
  return { lanes: lanes.slice((shown - 1) * LANES_PER_PAGE, shown * LANES_PER_PAGE), page: shown, pages };
}

/**
 * Returns the colour and the pattern of a job: always the same for the same job.
 * @param {string} jobId
 * @returns {[number, number]}
 */
export function lookOf(jobId) {
  let hash = 0x811c9dc5; // FNV-1a
  for (let at = 0; at < jobId.length; at += 1) hash = Math.imul(hash ^ jobId.charCodeAt(at), 0x01000193);
  hash = (hash ^ (hash >>> 15)) >>> 0;
  return [hash % COLOURS, Math.floor(hash / COLOURS) % PATTERNS];
}

/**
 * Sums up the visible part of the spans by job, the largest first. Hidden jobs count as one, which has no name.
 * @param {Span[]} spans
 * @param {{view: View, nowS: number}} shown
 */
export function jobsOf(spans, { view, nowS }) {
  const [fromS, toS] = timesOf(view, nowS);
  const jobs = new Map();
  for (const span of spans) {
    const seconds = Math.min(span.end_s ?? nowS, toS) - Math.max(span.begin_s, fromS);
    if (seconds < 0) continue;
    const empty = { id: span.job_id, name: span.name, queue: span.queue, owner: span.owner, gpuS: 0, lentGpuS: 0 };
    const job = jobs.get(span.job_id) ?? { ...empty, nodes: new Set(), resizedAt: new Set(), recalledAt: new Set() };
    job.gpuS += seconds * span.gpus.length;
    if (span.is_lent) job.lentGpuS += seconds * span.gpus.length;
    job.nodes.add(span.node);
    const endS = span.end_s ?? Infinity;
    if (endS < toS && span.end === "resized") job.resizedAt.add(endS);
    if (endS < toS && span.end === "recalled") job.recalledAt.add(endS);
    jobs.set(span.job_id, job);
  }
  return [...jobs.values()].sort((a, b) => b.gpuS - a.gpuS);
}

function clamp(value, least, most) {
  return Math.min(most, Math.max(least, value));
}
