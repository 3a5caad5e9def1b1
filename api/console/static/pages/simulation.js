// Simulation page: state, progress and report.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, card, el, facts, put, table } from "../dom.js";
import { count, duration, figure, percent, plural } from "../format.js";
import { actionButton } from "../actions.js";
import { keepUp } from "../live.js";
import { when } from "../times.js";
import { progress } from "./simulations.js";

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

export async function show(root, { params: [id], signal }) {
  const path = `/v1/simulations/${encodeURIComponent(id)}`;
  const names = ["state", "report", "refused", "actions"];
  const places = Object.fromEntries(names.map((name) => [name, el("div")]));
  places.actions.className = "row";
  const options = { refused: places.refused, acted: () => again() };
  let isReported = false;
  const refresh = async () => {
    const simulation = await get(path, { signal });
    put(places.state, card("State", standing(simulation)));
    const isLive = ["queued", "running"].includes(simulation.state);
    if (isLive !== places.isLive) put(places.actions, isLive && actionButton(cancelling(path, simulation), options));
    places.isLive = isLive;
    if (simulation.state !== "succeeded" || isReported) return;
    isReported = true;
    put(places.report, reportCard(await get(`${path}/report`, { signal })));
  };
  const back = el("p", { class: "small" }, el("a", { href: "#/simulate" }, "Simulate"));
  const head = el("div", { class: "head" }, el("div", { class: "grow" }, back, el("h1", {}, id)), places.actions);
  put(root, head, el("div", { class: "stack" }, places.refused, places.state, places.report));
  const failed = (error) => put(places.refused, error && problemNote(error));
  const again = keepUp(refresh, { signal, everyS: 1, wants: () => false, failed });
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
  ])];
}

function cancelling(path, simulation) {
  return {
    name: "Cancel",
    title: "Cancel this simulation?",
    what: [`It is ${simulation.state}. Its results so far are discarded.`],
    path,
    method: "DELETE",
    done: "The simulation is being cancelled.",
    danger: true,
  };
}

function reportCard({ seed, policies }) {
  const columns = [["Metric"], ...policies.map((each) => [each.policy, true])];
  const rows = ROWS.map(([name, of]) => [name, ...policies.map(of)]);
  const extra = el("span", { class: "small muted" }, `seed ${seed}`);
  return card(["Report", extra], table("Comparison of policy sets", columns, rows));
}
