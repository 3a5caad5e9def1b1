// Simulation page: state, progress, report and charts of one simulation, or of two side by side (`?with=`).

import { get } from "../api.js";
import { ChartCards } from "../chart_cards.js";
import { problemNote } from "../dialogs.js";
import { badge, card, el, facts, put, table } from "../dom.js";
import { count, duration, figure, percent, plural } from "../format.js";
import { actionButton } from "../actions.js";
import { keepUp } from "../live.js";
import { simulationCharts } from "../simulation_charts.js";
import { when } from "../times.js";
import { progress } from "./simulations.js";

/** @type {[string, (report: any) => string][]} */
const ROWS = [
  ["Jobs completed", (r) => `${count(r.completed)} of ${count(r.jobs)}`],
  ["Mean completion time", (r) => duration(r.jct_s.mean)],
  ["Completion time, p99", (r) => duration(r.jct_s.p99)],
  ["Mean queueing time", (r) => duration(r.queueing_s.mean)],
  ["Queueing time, p99", (r) => duration(r.queueing_s.p99)],
  ["Makespan", (r) => duration(r.makespan_s)],
  ["GPU utilization, training pools", (r) => percent(r.usage_ratio.training)],
  ["GPU utilization, overall", (r) => percent(r.usage_ratio.overall)],
  ["Loans", (r) => `${count(r.loans)}, ${figure(r.loaned_gpu_hours)} GPU-hours`],
  ["Lent and unused beyond the minimum loan", (r) => `${figure(r.unused_loan_gpu_hours)} GPU-hours`],
  ["Recalls, late returns", (r) => `${count(r.recalls)}, ${count(r.recalls_late)}`],
  ["Inference shortage, first pass of the trace", (r) => percent(r.inference_short_intervals_ratio.first_pass)],
  ["Preemptions", (r) => `${count(r.preemptions)} (${percent(r.preemption_ratio)} of jobs)`],
  ["Resizes", (r) => count(r.resizes)],
  ["Work lost", (r) => `${figure(r.lost_gpu_hours)} GPU-hours (${percent(r.lost_ratio)})`],
  ["Idle while jobs were pending", (r) => `${figure(r.idle_while_waiting_gpu_hours)} GPU-hours`],
  ["Deadlines met", (r) => percent(r.deadlines_met_ratio)],
  ["Decisions dropped", (r) => count(r.violations)],
];

export const title = (id) => id;

export async function show(root, { params: [id], query, signal }) {
  const ids = [id, query.get("with")].filter(Boolean);
  const paths = ids.map((each) => `/v1/simulations/${encodeURIComponent(each)}`);
  const names = ["state", "report", "charts", "refused", "actions"];
  const places = Object.fromEntries(names.map((name) => [name, el("div")]));
  places.actions.className = "row";
  places.charts.className = "halves";
  const options = { refused: places.refused, acted: () => again() };
  let isReported = false;
  let wasLive = null;
  const refresh = async () => {
    const simulations = await Promise.all(paths.map((path) => get(path, { signal })));
    put(places.state, el("div", { class: "halves" }, simulations.map((each) => card(titleOf(each), standing(each)))));
    const live = simulations.filter((each) => ["queued", "running"].includes(each.state)).map((each) => each.id);
    if (String(live) !== wasLive) {
      const shown = simulations.filter((each) => live.includes(each.id));
      put(places.actions, shown.map((each) => actionButton(cancelling(each), options)));
    }
    wasLive = String(live);
    if (simulations.some((each) => each.state !== "succeeded") || isReported) return;
    isReported = true;
    await report(simulations, paths, places, signal);
  };
  const back = el("p", { class: "small" }, el("a", { href: "#/simulate" }, "Simulate"));
  const head = el("div", { class: "head" }, el("div", { class: "grow" }, back, el("h1", {}, id)), places.actions);
  put(root, head, el("div", { class: "stack" }, places.refused, places.state, places.report, places.charts));
  const failed = (error) => put(places.refused, error && problemNote(error));
  const again = keepUp(refresh, { signal, everyS: 1, wants: () => false, failed });
}

/** Name of a simulation: the change of a replay, else "State". */
function titleOf({ description }) {
  return description.split("\n")[0] || "State";
}

/** Draws the reports of one or two simulations side by side, and their charts. */
async function report(simulations, paths, places, signal) {
  const reports = await Promise.all(paths.map((path) => get(`${path}/report`, { signal })));
  const charts = await Promise.all(paths.map((path) => get(`${path}/series`, { signal })));
  const nameOf = (policy, at) => {
    const change = simulations[at].description.split("\n")[0].split(": ")[1];
    return simulations.length > 1 ? `${policy}, ${change ?? simulations[at].id}` : policy;
  };
  const columns = reports.flatMap(({ policies }, at) => {
    return policies.map((each) => ({ label: nameOf(each.policy, at), report: each }));
  });
  put(places.report, reportCard(reports[0].seed, columns));
  const runs = charts.flatMap(({ series }, at) => {
    return series.map((each) => ({ label: nameOf(each.policy, at), series: each }));
  });
  if (runs.length) new ChartCards(signal, places.charts).update(simulationCharts(runs));
}

function standing(simulation) {
  const { progress: jobs, started_at_s: started, ended_at_s: ended } = simulation;
  return [progress(simulation), facts([
    ["State", badge(simulation.state)],
    ["Policy sets", simulation.policies.join(", ")],
    ["Jobs simulated", `${count(jobs.jobs_done)} of ${count(jobs.jobs_total)}, over all policy sets`],
    ["Current policy set", simulation.progress.playing],
    ["Submitted", el("span", {}, when(simulation.created_at_s), simulation.owner ? ` by ${simulation.owner}` : "")],
    ["Duration", ended && started ? duration(ended - started) : null],
    ["Attempts", simulation.tries > 1 ? plural(simulation.tries, "attempt") : null],
    ["Reason", simulation.reason],
    ["Differs from the recorded cluster", differences(simulation)],
  ])];
}

function differences({ description }) {
  const lines = description.split("\n").slice(1);
  return lines.length > 0 && el("ul", { class: "plain" }, lines.map((line) => el("li", {}, line)));
}

function cancelling(simulation) {
  const path = `/v1/simulations/${encodeURIComponent(simulation.id)}`;
  return {
    name: `Cancel ${simulation.id}`,
    title: "Cancel this simulation?",
    what: [`It is ${simulation.state}. Its results so far are discarded.`],
    path,
    method: "DELETE",
    done: "The simulation is being cancelled.",
    danger: true,
  };
}

function reportCard(seed, reports) {
  const columns = [["Metric"], ...reports.map(({ label }) => [label, true])];
  const rows = ROWS.map(([name, of]) => [name, ...reports.map((each) => of(each.report))]);
  const extra = el("span", { class: "small muted" }, `seed ${seed}`);
  const shown = table("Comparison of policy sets", columns, rows);
  shown.classList.add("figure-rows");
  return card(["Report", extra], shown);
}
