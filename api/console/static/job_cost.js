// GPU time and cost of jobs, as the API computes them: rows of figures, a table of generations, and notes.

import { el, table } from "./dom.js";
import { count, duration, figure, money, plural } from "./format.js";
import { when } from "./times.js";

const HOUR_S = 3600;
const GENERATIONS_MAX = 20;
const hours = (gpuS) => figure(gpuS / HOUR_S);

/**
 * Returns rows of the comparison: [name, value of a job]. Rows with amounts exist only if prices are set.
 * @param {any[]} costs of the jobs
 * @returns {[string, (job: any) => string][]}
 */
export function costRows(costs) {
  const isPriced = costs.some((cost) => cost.currency !== null);
  const amount = (of) => ({ cost }) => (cost.amounts ? money(of(cost.amounts), cost.currency) : "–");
  return [
    ["GPU-hours", ({ cost }) => hours(cost.held_gpu_s)],
    ["GPU-hours on own nodes", ({ cost }) => hours(cost.own_gpu_s)],
    ["GPU-hours on loan", ({ cost }) => hours(cost.lent_gpu_s)],
    ...(isPriced ? /** @type {[string, (job: any) => string][]} */ ([
      ["Cost", amount((amounts) => amounts.used)],
      ["Cost of GPU time on loan", amount((amounts) => amounts.on_loan)],
    ]) : []),
  ];
}

/**
 * Lists the newest generations with their time, GPU models, GPU-hours and cost.
 * @param {any} cost
 * @param {string} name
 */
export function generationTable(cost, name) {
  const shown = cost.generations.slice(-GENERATIONS_MAX).reverse();
  const amount = (each) => (each.amounts ? [money(each.amounts.used, cost.currency)] : []);
  const rows = shown.map((each) => [
    count(each.generation),
    when(each.begin_s),
    duration(Math.round((each.end_s ?? cost.as_of_s) - each.begin_s)),
    each.gpus.join(", "),
    hours(each.own_gpu_s),
    hours(each.lent_gpu_s),
    ...amount(each),
  ]);
  /** @type {[string, boolean?][]} */
  const columns = [["No."], ["Began"], ["For", true], ["GPU models"], ["Own, GPU-h", true], ["On loan, GPU-h", true]];
  if (cost.currency) columns.push(["Cost", true]);
  const left = cost.generations.length - shown.length;
  const older = left > 0 && el("p", { class: "small muted" }, `and ${plural(left, "older generation")}`);
  if (!rows.length) return el("p", { class: "muted" }, "No GPU time is recorded.");
  return el("div", {}, table(`GPU time and cost of ${name} by generation`, columns, rows), older);
}

/**
 * Says what the figures of the jobs leave out.
 * @param {any[]} costs
 */
export function costNotes(costs) {
  const unpriced = [...new Set(costs.flatMap((cost) => cost.unpriced))].sort();
  const unrecordedS = costs.reduce((sum, cost) => sum + cost.unrecorded_gpu_s, 0);
  const lines = [
    unpriced.length > 0 && `No price is set for ${unpriced.join(", ")}: costs leave out these GPU models.`,
    unrecordedS > 0 && `For ${hours(unrecordedS)} GPU-hours no allocation is recorded or retained: `
      + "own nodes, loans and costs leave them out.",
  ].filter(Boolean);
  return lines.length > 0 && el("div", { class: "note" }, lines.map((line) => el("p", {}, line)));
}
