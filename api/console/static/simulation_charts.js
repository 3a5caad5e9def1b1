// Charts of simulations: a line per policy set. The pages of simulations and report files share them.

/**
 * @typedef {{label: string, series: any}} Run series of a policy set with its name, as in /v1/simulations/{id}/series
 * @typedef {import("../types/charts").Chart} Chart
 */

const DAY_S = 86_400;
const LONG_DAYS = 21; // single days are not distinguishable beyond
const POINTS_MAX = 240;
const CROWDED = 50; // queues beyond have a logarithmic axis
const CROWDED_SCALE = " The scale is logarithmic from 10 on.";
const GRID_POINTS = 160;
const DECADE = 10;
const TRAINING_USE = "Share of the pools' GPUs that did useful work. Start-up, checkpoints and lost work do not count.";
const INFERENCE_USE = "Inference demand, and useful work of jobs on lent nodes, as a share of the pools' GPUs.";
const LENDING = "The area shows nodes idle by demand: a line above it means that inference is short of nodes. The thin "
  + "line shows nodes idle by the forecast at the lending quantile, over the time that a return takes.";
const COMPLETION = "Cumulative share of completed jobs by the time from submission to completion; further left is "
  + "better. Jobs that did not complete are missing: compare the numbers of completed jobs first.";
const COLOURS = ["training", "recalled", "inference", "lent", "cordoned"];
const DASHES = [undefined, [8, 3], [3, 3], [10, 3, 2, 3]];

/** Line styles that differ for up to 20 policy sets. */
export function styleOf(at) {
  return { colour: COLOURS[at % COLOURS.length], dash: DASHES[Math.floor(at / COLOURS.length) % DASHES.length] };
}

/**
 * Returns the charts that have data.
 * @param {Run[]} runs
 * @returns {Chart[]}
 */
export function simulationCharts(runs) {
  const window = new TimeWindow(runs);
  return [queueChart(runs, window), ...usageCharts(runs, window), lendingChart(runs, window), completionChart(runs)]
    .filter((each) => each !== null);
}

/** The time that charts cover, and columns of values in it. All series get the same intervals. */
class TimeWindow {
  /** @param {Run[]} runs */
  constructor(runs) {
    const all = runs.map(({ series }) => series);
    this.endS = shownEndS(all);
    this.isLong = this.endS > LONG_DAYS * DAY_S;
    this.fineS = Math.max(...all.map((series) => series.step_s));
    const coarseS = this.isLong ? DAY_S : this.endS / POINTS_MAX;
    this.coarseS = this.fineS * Math.max(1, Math.ceil(coarseS / this.fineS));
    const submittedS = all[0].submitting_s;
    this.marks = submittedS > 0 && submittedS < this.endS ? [{ x: submittedS, label: "last submission" }] : [];
  }

  /**
   * Completes a chart over time. With `isStepped`, values hold from the start of fine intervals; else lines connect the
   * middles of coarse ones.
   * @param {any} chart
   * @returns {Chart}
   */
  chart({ title, caption, isStepped = false, data, ...spec }) {
    const [stepS, offset] = isStepped ? [this.fineS, 0] : [this.coarseS, 0.5];
    const xs = Array.from({ length: Math.ceil(this.endS / stepS - offset) }, (_, at) => (at + offset) * stepS);
    const { marks } = this;
    const time = { xs: "Since the first submission", xFormat: "duration", together: "simulation", zoom: true, marks };
    return {
      title,
      caption,
      spec: { label: title, ...time, ...spec },
      data: [xs, ...data.map((values) => xs.map((_, at) => values[at] ?? null))],
      span: [0, this.endS],
    };
  }

  /** Means of values that a series has every `step_s` seconds. */
  means(series, values, stepS = this.coarseS) {
    return groupMeans(values, Math.max(1, Math.round(stepS / series.step_s)));
  }
}

/**
 * Returns the end of the time axis: just after the last submission, or when the queues are empty. The last long jobs
 * finish later; that tail can double the length of the axis.
 */
export function shownEndS(allSeries) {
  const longestS = Math.max(...allSeries.map((series) => series.step_s * series.queued_jobs.length));
  const submittingS = allSeries[0].submitting_s;
  if (!submittingS) return longestS;
  const emptyS = allSeries.map((series) => series.step_s * (1 + series.queued_jobs.findLastIndex((jobs) => jobs > 0)));
  return Math.min(longestS, Math.max(1.03 * submittingS, ...emptyS));
}

/** Returns the means of groups of `size` values. */
export function groupMeans(values, size) {
  const groups = Array.from({ length: Math.ceil(values.length / size) }, (_, at) => {
    return values.slice(at * size, (at + 1) * size);
  });
  return groups.map((group) => group.reduce((sum, value) => sum + value, 0) / group.length);
}

function lines(runs) {
  return runs.map(({ label }, at) => ({ label, ...styleOf(at) }));
}

/** @returns {Chart} */
function queueChart(runs, window) {
  const isCrowded = Math.max(...runs.flatMap(({ series }) => series.queued_jobs)) > CROWDED;
  return window.chart({
    title: "Pending jobs",
    caption: `Submitted jobs without GPUs, including preempted jobs.${isCrowded ? CROWDED_SCALE : ""}`,
    unit: "jobs",
    yScale: isCrowded ? "symlog" : "linear",
    series: lines(runs),
    data: runs.map(({ series }) => window.means(series, series.queued_jobs)),
  });
}

/** @returns {Chart[]} */
function usageCharts(runs, window) {
  const usage = (title, column, caption) => window.chart({
    title,
    caption: window.isLong ? `${caption} Daily means.` : caption,
    unit: "%",
    series: lines(runs),
    data: runs.map(({ series }) => window.means(series, series[column].map((ratio) => 100 * ratio))),
  });
  const training = usage("Useful work of training pools", "training_usage_ratio", TRAINING_USE);
  if (!runs[0].series.inference_nodes) return [training];
  return [training, usage("Useful work of inference pools", "inference_usage_ratio", INFERENCE_USE)];
}

/** @returns {Chart | null} */
function lendingChart(runs, window) {
  const lenders = runs.filter(({ series }) => series.lent_nodes.some((nodes) => nodes > 0));
  if (!lenders.length) return null;
  const lengthS = (series) => series.step_s * series.lent_nodes.length;
  const { series } = lenders.reduce((one, other) => (lengthS(other.series) > lengthS(one.series) ? other : one));
  const stepped = { stepped: true, width: 1 };
  const widthOf = (at) => 2 + 1.2 * Math.min(4, runs.length - 1 - at); // lines often coincide: those behind are wider
  const idle = (gpus) => window.means(series, gpus, window.fineS)
    .map((needed) => Math.max(0, series.inference_nodes * (1 - needed / series.inference_gpus)));
  return window.chart({
    title: "Nodes on loan",
    caption: LENDING,
    unit: "nodes",
    isStepped: true,
    series: [
      { label: "Idle by demand", colour: "line-strong", fill: "sunken", ...stepped },
      { label: "Idle by forecast", colour: "text", ...stepped },
      ...lines(runs).map((each, at) => ({ ...each, stepped: true, width: widthOf(at) })),
    ],
    data: [
      idle(series.demand_gpus),
      idle(series.forecast_gpus),
      ...runs.map((run) => window.means(run.series, run.series.lent_nodes, window.fineS)),
    ],
  });
}

/** @returns {Chart | null} */
function completionChart(runs) {
  const completed = runs.map((run, at) => ({ ...run, at })).filter(({ series }) => series.jct_s.length > 1);
  if (!completed.length) return null;
  const times = completed.map(({ series }) => series.jct_s);
  const [low, high] = completionRange(times);
  const ratio = (high / low) ** (1 / (GRID_POINTS - 1));
  const xs = Array.from({ length: GRID_POINTS }, (_, at) => low * ratio ** at);
  return {
    title: "Completion times",
    caption: COMPLETION,
    spec: {
      label: "Completion times",
      xs: "Completed within",
      xFormat: "duration",
      xScale: "log",
      unit: "%",
      headroom: 1,
      zoom: true,
      series: completed.map(({ label, at }) => ({ label, ...styleOf(at) })),
    },
    data: [xs, ...times.map((each) => xs.map((x) => 100 * shareWithin(each, x)))],
  };
}

/** Returns the range from the first 0.5% of the jobs to the last one, at least a decade. */
export function completionRange(times) {
  const low = Math.max(1, Math.min(...times.map((each) => each[Math.floor(each.length / 200)])));
  const high = Math.max(low, ...times.map((each) => each.at(-1)));
  const pad = Math.sqrt(Math.max(1, DECADE / (high / low)));
  return [low / pad, high * pad];
}

/** Returns the share of jobs that completed within `x` seconds, interpolated between ascending quantiles. */
export function shareWithin(quantiles, x) {
  if (x < quantiles[0]) return 0;
  const above = quantiles.findIndex((each) => each > x);
  if (above < 0) return 1;
  const [low, high] = [quantiles[above - 1], quantiles[above]];
  return (above - 1 + (x - low) / (high - low)) / (quantiles.length - 1);
}
