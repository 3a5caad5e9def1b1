// One simulation: how far it is, and its report.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, card, el, facts, put, table } from "../dom.js";
import { count, duration, figure, percent, plural } from "../format.js";
import { leverButton } from "../levers.js";
import { keepUp } from "../live.js";
import { when } from "../times.js";
import { progress } from "./simulations.js";

const ROWS = [
  ["Jobs completed", (r) => `${count(r.completed)} of ${count(r.jobs)}`],
  ["Mean completion time", (r) => duration(r.jct_s.mean)],
  ["99th percentile of it", (r) => duration(r.jct_s.p99)],
  ["Mean wait", (r) => duration(r.queueing_s.mean)],
  ["99th percentile of it", (r) => duration(r.queueing_s.p99)],
  ["Makespan", (r) => duration(r.makespan_s)],
  ["GPUs used, training's own", (r) => percent(r.usage_ratio.training)],
  ["GPUs used, overall", (r) => percent(r.usage_ratio.overall)],
  ["Loans", (r) => `${count(r.loans)}, ${figure(r.loaned_gpu_hours)} GPU hours`],
  ["Recalls, of which late", (r) => `${count(r.recalls)}, ${count(r.recalls_late)}`],
  ["Inference short", (r) => percent(r.inference_short_intervals_ratio.all)],
  ["Preemptions", (r) => `${count(r.preemptions)} (${percent(r.preemption_ratio)} of jobs)`],
  ["Resizes", (r) => count(r.resizes)],
  ["Work lost", (r) => `${figure(r.lost_gpu_hours)} GPU hours (${percent(r.lost_ratio)})`],
  ["Idle while jobs wait", (r) => `${figure(r.idle_while_waiting_gpu_hours)} GPU hours`],
  ["Deadlines met", (r) => percent(r.deadlines_met_ratio)],
  ["Decisions dropped", (r) => count(r.violations)],
];

export const title = (id) => id;

export async function show(root, { params: [id], signal }) {
  const path = `/v1/simulations/${encodeURIComponent(id)}`;
  const names = ["state", "report", "refused", "levers"];
  const places = Object.fromEntries(names.map((name) => [name, el("div")]));
  places.levers.className = "row";
  const options = { refused: places.refused, acted: () => again() };
  let isReported = false;
  const refresh = async () => {
    const told = await get(path, { signal });
    put(places.state, card("State", standing(told)));
    const isLive = ["queued", "running"].includes(told.state);
    if (isLive !== places.isLive) put(places.levers, isLive && leverButton(cancelling(path, told), options));
    places.isLive = isLive;
    if (told.state !== "succeeded" || isReported) return;
    isReported = true;
    put(places.report, reportCard(await get(`${path}/report`, { signal })));
  };
  const back = el("p", { class: "small" }, el("a", { href: "#/simulate" }, "Simulate"));
  const head = el("div", { class: "head" }, el("div", { class: "grow" }, back, el("h1", {}, id)), places.levers);
  put(root, head, el("div", { class: "stack" }, places.refused, places.state, places.report));
  const failed = (error) => put(places.refused, error && problemNote(error));
  const again = keepUp(refresh, { signal, everyS: 1, wants: () => false, failed });
}

function standing(told) {
  return [progress(told), facts([
    ["State", badge(told.state)],
    ["Policy sets", told.policies.join(", ")],
    ["Jobs played", `${count(told.progress.jobs_done)} of ${count(told.progress.jobs_total)}, over all policy sets`],
    ["Playing now", told.progress.playing],
    ["Handed in", el("span", {}, when(told.created_at_s), ` by ${told.owner || "nobody named"}`)],
    ["Took", told.ended_at_s && told.started_at_s ? duration(told.ended_at_s - told.started_at_s) : null],
    ["Tries", told.tries > 1 ? plural(told.tries, "try", "tries") : null],
    ["Why", told.reason],
  ])];
}

function cancelling(path, told) {
  return {
    name: "Cancel",
    title: "Cancel this simulation?",
    what: [`It is ${told.state}. What it has played is lost.`],
    path,
    method: "DELETE",
    done: "The simulation is being cancelled.",
    danger: true,
  };
}

function reportCard({ seed, policies }) {
  const columns = [["Figure"], ...policies.map((each) => [each.policy, true])];
  const rows = ROWS.map(([name, of]) => [name, ...policies.map(of)]);
  const extra = el("span", { class: "small muted" }, `seed ${seed}`);
  return card(["Report", extra], table("Policy sets compared", columns, rows));
}
