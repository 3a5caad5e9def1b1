// Job page: state and explanation, plan, charts, history and log.

import { eventsAfter, get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, card, copyButton, el, empty, facts, put, redraw } from "../dom.js";
import { count, gpus, words } from "../format.js";
import { jobActions, actionButton } from "../actions.js";
import { keepUp } from "../live.js";
import { planDrawing } from "../plan_drawing.js";
import { pipelineDrawing } from "../pipeline_drawing.js";
import { planText } from "../plan_words.js";
import { due, when } from "../times.js";
import { noChange, whoAmI } from "../permissions.js";
import { eventSteps, JobHistory } from "./job_history.js";
import { JobLog } from "./job_log.js";
import { JobRuns } from "./job_runs.js";
import { stepCard } from "./job_step.js";
import { details, figures } from "./job_details.js";

const EVENTS_AT_ONCE = 1000;
const DONE = ["succeeded", "cancelled"];
const WAITS = ["queued", "planning", "submitted", "preempted", "suspended"];

export const title = (id) => id;

export async function show(root, { params: [id], signal }) {
  const page = new JobPage(root, id, signal);
  const own = (event) => event.subject === id || /^(Node|Loan|Lending)/.test(event.code);
  page.again = keepUp(() => page.refresh(), { signal, everyS: 5, wants: own, failed: (error) => page.failed(error) });
}

class JobPage {
  again = async () => {}; // set once the page refreshes itself

  constructor(root, id, signal) {
    this.root = root;
    this.id = id;
    this.signal = signal;
    this.drawing = new AbortController(); // of the plan that is shown
    signal.addEventListener("abort", () => this.drawing.abort());
    this.path = `/v1/jobs/${encodeURIComponent(id)}`;
    this.places = null;
    this.events = [];
  }

  async refresh() {
    const ask = (part) => get(`${this.path}${part}`, { signal: this.signal });
    const [job, cost] = await Promise.all([ask(""), ask("/cost")]);
    this.disabledReason = noChange(await whoAmI(), job);
    this.places ??= this.#frame(job);
    document.title = `${job.name}, ${job.state} · Ebbtide`;
    this.#drawHead(job);
    put(this.places.figures, figures(job, cost));
    put(this.places.stand, details(job));
    await Promise.all([this.#why(job), this.#plan(job), this.#events(), this.history.refresh(job)]);
  }

  failed(error) {
    if (this.places) put(this.places.refused, error && problemNote(error));
    else if (error.status === 404) put(this.root, el("h1", {}, "Job not found"), noJob(this.id));
    else put(this.root, problemNote(error));
  }

  #frame(job) {
    const names = ["head", "actions", "refused", "figures", "stand", "why", "plan", "step", "events"];
    const places = Object.fromEntries(names.map((name) => [name, el("div")]));
    places.actions.className = "row";
    const log = new JobLog(job, this.path, this.signal);
    const runs = new JobRuns(this.path, this.signal, (generation) => log.openRun(generation));
    this.history = new JobHistory(this.path, this.signal, runs);
    const story = [places.why, runs.place, places.plan, places.step, this.history.place, log.card];
    const left = el("div", { class: "stack" }, story);
    const right = el("div", { class: "stack" }, places.stand, card("Events", places.events));
    put(
      this.root,
      el("div", { class: "head" }, el("div", { class: "grow" }, places.head), places.actions),
      el("div", { class: "stack" }, places.refused, places.figures, el("div", { class: "columns" }, left, right)),
    );
    return places;
  }

  #drawHead(job) {
    redraw(this.places.head, JSON.stringify([job.name, job.state, job.state_since_s, job.message]), () => {
      const back = el("p", { class: "small" }, el("a", { href: "#/jobs" }, "Jobs"));
      const since = ["since ", when(job.state_since_s), job.message && ` · ${job.message}`];
      const id = el("p", { class: "row small" }, el("code", {}, job.id), copyButton("the job ID", job.id));
      const state = el("p", { class: "row muted" }, badge(job.state), el("span", {}, since));
      return [back, el("h1", {}, job.name), state, id];
    });
    const state = JSON.stringify([job.state, job.intent, job.gpus, job.labels, this.disabledReason]);
    if (state === this.actionState) return; // keep buttons in place while the user is about to press one
    this.actionState = state;
    const options = { refused: this.places.refused, acted: () => this.again() };
    put(this.places.actions, jobActions(job, this.disabledReason).map((action) => actionButton(action, options)));
  }

  async #why(job) {
    const isDone = DONE.includes(job.state);
    const explanation = isDone ? null : await get(`${this.path}/explanation`, { signal: this.signal });
    redraw(this.places.why, JSON.stringify(explanation), () => explanation && whyCard(explanation));
  }

  async #plan(job) {
    if (!job.plan) {
      const isPlanned = job.state === "planning";
      const why = isPlanned ? "The solver is computing its plans." : "The job gets a plan with its first GPUs.";
      put(this.places.plan, card("Parallel plan", el("p", { class: "muted" }, why)));
      return;
    }
    const stepS = job.progress.step_time_s?.toPrecision(2);
    const isPlaced = Object.keys(job.nodes).length > 0;
    const key = `${job.generation} ${job.plan} ${job.progress.estimate === null} ${isPlaced} ${stepS}`;
    if (key === this.planKey) return; // unchanged
    const plan = await get(`${this.path}/plan`, { signal: this.signal });
    this.planKey = key;
    const copy = copyButton("the plan as text", () => planText(`${job.name}: ${job.plan}`, plan, plan.inspection));
    const extra = el("span", { class: "row muted small" }, job.plan, copy);
    this.drawing.abort();
    this.drawing = new AbortController();
    const { signal } = this.drawing;
    const schedule = plan.inspection && pipelineDrawing(plan, plan.inspection, signal);
    const drawn = [planDrawing(plan, plan.inspection), schedule && el("h3", {}, "Pipeline schedule"), schedule];
    put(this.places.plan, card(["Parallel plan", extra], drawn));
    put(this.places.step, stepCard(plan.step));
  }

  async #events() {
    let page;
    do {
      const after = this.events.at(-1)?.number ?? 0;
      page = await eventsAfter(after, { path: `${this.path}/events`, limit: EVENTS_AT_ONCE, signal: this.signal });
      this.events.push(...page.items);
    } while (page.next);
    redraw(this.places.events, String(this.events.length), () => eventSteps(this.events));
  }
}

function noJob(id) {
  const all = el("a", { href: "#/jobs?state=", class: "button" }, "All jobs");
  return empty(`There is no job ${id}`, "It may belong to another service or to a queue without access.", all);
}

function whyCard(explanation) {
  const isWaiting = WAITS.includes(explanation.state);
  const holders = Object.entries(explanation.holders).sort((a, b) => b[1] - a[1]).slice(0, 5);
  const link = (id) => el("a", { href: `#/jobs/${id}` }, id);
  const links = holders.flatMap(([id, held], at) => [at ? ", " : "", link(id), ` (${held})`]);
  const start = explanation.expected_start_s;
  const rows = facts([
    ["Queue position", isWaiting && explanation.position],
    ["Needs", isWaiting && `${gpus(explanation.needed_gpus)}; ${count(explanation.free_gpus)} usable GPUs are free`],
    ["Held by other jobs", isWaiting && holders.length ? el("span", {}, links) : null],
    ["Expected start", start ? due(start) : isWaiting && "unknown: depends on jobs without a known end"],
    ["Unblocked by", explanation.unblocks],
    ["Next tick", explanation.next && explanation.next.reason.detail],
  ]);
  const { code: reasonCode } = explanation.reason ?? {};
  const code = reasonCode && el("span", { class: "muted small", title: reasonCode }, words(reasonCode));
  const summary = explanation.summary.replace(/^\w+: /, "");
  const heading = [isWaiting ? "Why it is pending" : "Explanation", code];
  return card(heading, el("p", {}, summary[0].toUpperCase() + summary.slice(1)), rows.children.length ? rows : null);
}
