// Comparison of up to four jobs: curves over steps, GPUs, GPU time and cost by generation, and plans.

import { get } from "../api.js";
import { alignCurves, curveOf } from "../compare_series.js";
import { problemNote } from "../dialogs.js";
import { badge, card, el, empty, put, redraw, table } from "../dom.js";
import { count, duration, figure, gpus, percent, plural, range } from "../format.js";
import { costNotes, costRows, generationTable } from "../job_cost.js";
import { labelChips } from "../label_chips.js";
import { keepUp } from "../live.js";
import { chart } from "../plotting.js";
import { when } from "../times.js";
import { COMPARED_MAX } from "./jobs_bulk.js";

const HOUR_S = 3600;
const STYLES = [
  { colour: "training" },
  { colour: "recalled", dash: [8, 3] },
  { colour: "inference", dash: [3, 3] },
  { colour: "lent", dash: [10, 3, 2, 3] },
];

export const title = () => "Compare jobs";

export async function show(root, { query, signal }) {
  const ids = (query.get("jobs") ?? "").split(",").filter(Boolean).slice(0, COMPARED_MAX);
  const back = el("p", { class: "small" }, el("a", { href: "#/jobs" }, "Jobs"));
  const body = el("div", { class: "stack" });
  put(root, el("div", { class: "head" }, el("div", { class: "grow" }, back, el("h1", {}, "Compare jobs"))), body);
  if (ids.length < 2) return put(body, card("No jobs", noJobs()));
  const refused = el("div", {});
  const facts = el("div", {});
  const generations = el("div", {});
  const charts = el("div", { class: "halves" });
  put(body, refused, facts, charts, generations);
  const plots = new Map();
  const refresh = async () => {
    const jobs = await Promise.all(ids.map((id) => compared(id, signal)));
    put(facts, card("Jobs side by side", factsTable(jobs), costNotes(jobs.map((job) => job.cost))));
    redraw(generations, JSON.stringify(jobs.map((job) => job.cost.generations)), () => generationCard(jobs));
    for (const [column, name, spec] of CURVES) {
      const data = alignCurves(jobs.map((job) => curveOf(job.samples, column)));
      if (!plots.has(column)) plots.set(column, plotOf(name, spec, jobs, signal));
      plots.get(column).update(data);
    }
    if (!charts.children.length) put(charts, [...plots.values()].map((plot) => plot.card));
  };
  const failed = (error) => put(refused, error && problemNote(error));
  keepUp(refresh, { signal, everyS: 15, wants: (event) => ids.includes(event.subject), failed });
  return undefined;
}

/** @type {[string, string, object][]} */
const CURVES = [
  ["loss", "Loss over steps", { fromZero: false }],
  ["samples_per_s", "Throughput over steps", { unit: "samples/s" }],
];

async function compared(id, signal) {
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  const ask = (part) => get(`${path}${part}`, { signal });
  const [job, history, cost] = await Promise.all([ask(""), ask("/history"), ask("/cost")]);
  return { ...job, cost, samples: history.samples, allocations: history.allocations };
}

function plotOf(name, spec, jobs, signal) {
  const body = el("div", {});
  const whole = card(name, body);
  const names = labels(jobs);
  const series = jobs.map((_, at) => ({ label: names[at], ...STYLES[at] }));
  const drawn = chart(body, { label: name, xs: "Steps", series, height: 260, ...spec }, signal);
  return { card: whole, update: (data) => drawn.update(data) };
}

/** Names of jobs, with IDs if two have the same name. */
function labels(jobs) {
  const names = jobs.map((job) => job.name);
  return new Set(names).size === names.length ? names : jobs.map((job) => job.id);
}

const rowsOf = (costs) => [
  ["State", (job) => badge(job.state)],
  ["Queue", (job) => job.queue],
  ["Owner", (job) => job.owner || "none"],
  ["Labels", (job) => labelChips(job.labels) ?? "none"],
  ["Model", (job) => job.spec.model ?? "–"],
  ["Global batch", (job) => count(job.spec.globalBatch)],
  ["GPUs now, and range", (job) => `${gpus(job.gpus.target)}, ${range(job.gpus.min, job.gpus.max)}`],
  ["Steps", (job) => stepsOf(job.progress)],
  ["Last loss", (job) => figure(job.progress.loss)],
  ["Step time", (job) => duration(job.progress.step_time_s)],
  ...costRows(costs),
  ["GPU-hours lost", (job) => lostOf(job)],
  ["Steps per GPU-hour", (job) => efficiency(job)],
  ["Time pending", (job) => duration(Math.round(job.account.waited_s))],
  ["Resizes", (job) => count(job.account.resizes)],
  ["Preemptions", (job) => count(job.account.preemptions)],
  ["Failures", (job) => count(job.account.failures)],
  ["Plan", (job) => job.plan ?? "–"],
  ["Plans so far", (job) => plural(new Set(job.allocations.map((each) => each.plan).filter(Boolean)).size, "plan")],
  ["Submitted", (job) => when(job.submitted_at_s)],
];

function factsTable(jobs) {
  const names = labels(jobs);
  const columns = [["Figure"], ...jobs.map((job, at) => [el("a", { href: `#/jobs/${job.id}` }, names[at])])];
  const rows = rowsOf(jobs.map((job) => job.cost));
  const shown = table("Jobs side by side", columns, rows.map(([name, of]) => [name, ...jobs.map(of)]));
  shown.classList.add("figure-rows");
  return shown;
}

function stepsOf({ steps, steps_total: total, fraction }) {
  if (steps === null) return "not reported";
  const share = fraction === null ? "" : ` (${percent(fraction)})`;
  return total ? `${count(Math.floor(steps))} of ${count(total)}${share}` : count(Math.floor(steps));
}

function lostOf({ account: { lost_gpu_s: lostS }, cost: { held_gpu_s: wholeS } }) {
  return lostS >= 1 ? `${figure(lostS / HOUR_S)} (${percent(lostS / wholeS)})` : "0";
}

function efficiency({ progress, cost }) {
  return progress.steps && cost.held_gpu_s ? figure(progress.steps / (cost.held_gpu_s / HOUR_S)) : "–";
}

function generationCard(jobs) {
  const names = labels(jobs);
  const tables = jobs.map((job, at) => el("div", {}, el("h3", {}, names[at]), generationTable(job.cost, names[at])));
  return card("GPU time and cost by generation", el("div", { class: "halves" }, tables));
}

function noJobs() {
  const link = el("a", { href: "#/jobs", class: "button" }, "Choose jobs");
  return empty("No jobs to compare", `Select 2 to ${COMPARED_MAX} jobs in the list, then Compare.`, link);
}
