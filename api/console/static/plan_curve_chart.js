// Chart and table of a scaling curve: the best plan by number of GPUs. The plan page and report files share them.

import { el, table } from "./dom.js";
import { count, duration, figure, percent } from "./format.js";
import { shapeWords } from "./plan_words.js";

const CAPTION = "The dashed line is linear scaling from the smallest number of GPUs that has a plan.";
/** @type {import("../types/charts").ChartSpec} */
const SPEC = {
  label: "Throughput by GPUs",
  xs: "GPUs",
  unit: "samples/s",
  xScale: "log",
  yScale: "log",
  height: 260,
  series: [
    { label: "Best plan", colour: "training", points: true },
    { label: "Linear scaling", colour: "muted", dash: [4, 4], width: 1 },
    { label: "Fewer GPUs are as fast", colour: "recalled", points: "only" },
  ],
};

/**
 * @typedef {{gpus: number, infeasible?: string, samples_per_s?: number, iteration_time_s?: number, stages?: any[],
 *   schedule?: any}} Point the best plan on a number of GPUs, or the reason why there is none
 */

/**
 * Returns the chart of the points that have a plan.
 * @param {Point[]} points in ascending order
 * @returns {import("../types/charts").Chart}
 */
export function curveChart(points) {
  const feasible = points.filter((point) => !point.infeasible);
  const one = ratePerGpu(points);
  const rates = feasible.map((point) => point.samples_per_s);
  const isSlow = (rate, at) => rates.slice(0, at).some((fewer) => fewer >= rate);
  return {
    title: "Scaling curve",
    caption: CAPTION,
    spec: SPEC,
    data: [
      feasible.map(({ gpus }) => gpus),
      rates,
      feasible.map(({ gpus }) => gpus * one),
      rates.map((rate, at) => (isSlow(rate, at) ? rate : null)),
    ],
  };
}

/**
 * Renders a row per number of GPUs.
 * @param {Point[]} points in ascending order
 */
export function planTable(points) {
  const one = ratePerGpu(points);
  const rows = points.map((point) => {
    const { gpus, infeasible, iteration_time_s: stepS, samples_per_s: rate } = point;
    if (infeasible) return [count(gpus), el("span", { class: "muted" }, infeasible), "–", "–", "–"];
    return [count(gpus), shapeWords(point), duration(stepS), figure(rate), percent(rate / (gpus * one))];
  });
  const columns = [["GPUs"], ["Plan"], ["Step", true], ["Samples/s", true], ["Efficiency", true]];
  return table("Plans by GPUs", columns, rows);
}

/** Returns the throughput of a GPU in the smallest feasible plan. */
function ratePerGpu(points) {
  const first = points.find((point) => !point.infeasible);
  return first ? first.samples_per_s / first.gpus : 0;
}
