// Scaling curve of a plan request: plans solved one by one, drawn as they arrive.

import { post, Problem } from "./api.js";
import { card, el, put } from "./dom.js";
import { gpus } from "./format.js";
import { curveChart, planTable } from "./plan_curve_chart.js";
import { chart } from "./plotting.js";

const BUSY_MS = 1200;
const BUSY_TRIES = 30;

/** Requests a plan. Retries while the solver is busy. */
export async function solved(question, signal) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await post("/v1/plans", question, { signal });
    } catch (error) {
      if (!(error instanceof Problem && error.status === 429) || tries === BUSY_TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, BUSY_MS));
    }
  }
}

/** Like `solved`, but returns {infeasible} with the reason if there is no plan. */
export async function solvedPoint(question, signal) {
  try {
    return await solved(question, signal);
  } catch (error) {
    if (error instanceof Problem && error.slug === "infeasible") return { infeasible: error.message };
    throw error;
  }
}

/**
 * Draws the curve in `place`. Solves the points one by one, so that other users can use the solver in between.
 * @param {Record<string, any>} question with `gpu`
 * @param {Map<number, any>} points those already solved, by number of GPUs
 * @param {number[]} wanted numbers of GPUs, ascending
 */
export async function scalingCurve(question, points, wanted, place, signal) {
  const body = el("div", {});
  const status = el("p", { class: "small muted", role: "status" });
  const rows = el("div", {});
  put(place, card(["Scaling curve", status], body, rows));
  const drawn = chart(body, curveChart([]).spec, signal);
  for (const [at, number] of wanted.entries()) {
    status.textContent = `solving ${gpus(number)}, ${at + 1} of ${wanted.length}`;
    if (!points.has(number)) points.set(number, await solvedPoint({ ...question, gpus: number }, signal));
    draw(points, drawn, rows);
  }
  status.textContent = `up to ${gpus(wanted.at(-1))}`;
}

function draw(solvedPlans, drawn, rows) {
  const points = [...solvedPlans].sort((a, b) => a[0] - b[0]).map(([number, plan]) => ({ ...plan, gpus: number }));
  drawn.update(curveChart(points).data);
  put(rows, planTable(points));
}
