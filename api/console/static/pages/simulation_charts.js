// Charts of a simulation's report over time: one line per policy set.

import { alignCurves } from "../compare_series.js";
import { card, el } from "../dom.js";
import { chart } from "../plotting.js";

const HOUR_S = 3600;
const COLOURS = ["training", "recalled", "inference", "lent", "cordoned"];
const DASHES = [undefined, [8, 3], [3, 3], [10, 3, 2, 3]];

/** Line styles that differ for up to 20 policy sets. */
function styleOf(at) {
  return { colour: COLOURS[at % COLOURS.length], dash: DASHES[Math.floor(at / COLOURS.length) % DASHES.length] };
}

/**
 * Renders the charts that have data.
 * @param {{label: string, series: any}[]} runs series of each policy set with its name
 * @param {AbortSignal} signal
 */
export function simulationCharts(runs, signal) {
  const overTime = (column, factor = 1) => runs.map(({ series }) => {
    return series[column].map((y, at) => ({ x: (at * series.step_s) / HOUR_S, y: y * factor }));
  });
  const lines = runs.map(({ label }, at) => ({ label, ...styleOf(at) }));
  const [{ series: first }] = runs;
  const isLending = runs.some(({ series }) => series.lent_nodes.some((each) => each > 0));
  const perNode = first.inference_nodes ? first.inference_gpus / first.inference_nodes : 0;
  const idle = perNode && first.demand_gpus.map((gpus, at) => ({
    x: (at * first.step_s) / HOUR_S,
    y: Math.max(0, first.inference_nodes - gpus / perNode),
  }));
  const idleLine = { label: "Idle by demand", colour: "line-strong", fill: "sunken", width: 1 };
  const draw = (name, spec, series, curves) => {
    const body = el("div", {});
    const whole = card(name, body);
    chart(body, { label: name, height: 240, series, ...spec }, signal).update(alignCurves(curves));
    return whole;
  };
  const hours = { xs: "Hours", together: "simulation" };
  const completed = runs.filter(({ series }) => series.jct_s.length > 1);
  const share = (series) => series.jct_s.map((y, at) => ({ x: (100 * at) / (series.jct_s.length - 1), y: y / HOUR_S }));
  return el("div", { class: "halves" }, [
    draw("Pending jobs", { ...hours, unit: "jobs" }, lines, overTime("queued_jobs")),
    draw("Use of training pools", { ...hours, unit: "%" }, lines, overTime("training_usage_ratio", 100)),
    isLending && draw("Nodes on loan", { ...hours, unit: "nodes" }, [idleLine, ...lines],
      [idle || [], ...overTime("lent_nodes")]),
    completed.length > 0 && draw("Completion time, by share of jobs", { xs: "Share of jobs (%)", unit: "h" },
      completed.map(({ label }, at) => ({ label, ...styleOf(at) })), completed.map(({ series }) => share(series))),
  ]);
}
