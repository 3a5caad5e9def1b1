// Scaling curve of a plan request: plans solved one by one, drawn as they arrive.

import { post, Problem } from "./api.js";
import { card, el, put, table } from "./dom.js";
import { count, duration, figure, gpus, percent } from "./format.js";
import { devicesOf } from "./plan_words.js";
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
  const series = [
    { label: "Throughput", colour: "training", points: true },
    { label: "Linear scaling", colour: "muted", dash: [4, 4], width: 1 },
  ];
  const drawn = chart(body, { label: "Throughput by GPUs", xs: "GPUs", unit: "samples/s", series }, signal);
  for (const [at, number] of wanted.entries()) {
    status.textContent = `solving ${gpus(number)}, ${at + 1} of ${wanted.length}`;
    if (!points.has(number)) points.set(number, await solvedPoint({ ...question, gpus: number }, signal));
    draw(points, drawn, rows);
  }
  status.textContent = `up to ${gpus(wanted.at(-1))}`;
}

function draw(points, drawn, rows) {
  const sorted = [...points].sort((a, b) => a[0] - b[0]);
  const feasible = sorted.filter(([, plan]) => !plan.infeasible);
  const [first] = feasible;
  const one = first ? first[1].samples_per_s / first[0] : 0;
  const numbers = feasible.map(([number]) => number);
  drawn.update([numbers, feasible.map(([, plan]) => plan.samples_per_s), numbers.map((number) => number * one)]);
  const lines = sorted.map(([number, plan]) => {
    if (plan.infeasible) return [count(number), el("span", { class: "muted" }, plan.infeasible), "–", "–", "–"];
    const { iteration_time_s: stepS, samples_per_s: speed } = plan;
    return [count(number), shapeWords(plan), duration(stepS), figure(speed), percent(speed / (number * one))];
  });
  const columns = [["GPUs"], ["Plan"], ["Step", true], ["Samples/s", true], ["Efficiency", true]];
  put(rows, table("Plans by GPUs", columns, lines));
}

/** Formats the degrees of a plan's first layers: pipeline ×2, data ×8. */
export function shapeWords(plan) {
  const [{ tp, dp, ulysses, ring }] = plan.stages[0].strategies;
  const stages = devicesOf(plan).length;
  const degrees = [["pipeline", stages], ["tensor", tp], ["sequence", ulysses * ring], ["data", dp]];
  const words = degrees.filter(([, degree]) => degree > 1).map(([name, degree]) => `${name} ×${degree}`);
  return words.join(", ") || "one GPU";
}
