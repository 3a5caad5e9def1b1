// One job: where it stands and why, its plan, its curves, its history, what it prints.

import { get } from "../api.js";
import { problemNote, showProblem } from "../dialogs.js";
import { badge, bar, card, el, facts, put, redraw } from "../dom.js";
import { ago, bytes, count, duration, figure, gpus, percent, plural, time } from "../format.js";
import { jobLevers, leverButton, scale } from "../levers.js";
import { keepUp } from "../live.js";
import { planDrawing } from "../plan_drawing.js";
import { eventSteps, JobHistory } from "./job_history.js";
import { logCard } from "./job_log.js";

const EVENTS_AT_ONCE = 1000;

export const title = (id) => id;

export async function show(root, { params: [id], signal }) {
  const page = new JobPage(root, id, signal);
  const own = (event) => event.subject === id || /^(Node|Loan|Lending)/.test(event.code);
  page.again = keepUp(() => page.refresh(), { signal, everyS: 5, wants: own, failed: (error) => page.failed(error) });
}

class JobPage {
  constructor(root, id, signal) {
    this.root = root;
    this.id = id;
    this.signal = signal;
    this.path = `/v1/jobs/${encodeURIComponent(id)}`;
    this.places = null;
    this.events = [];
  }

  async refresh() {
    const job = await get(this.path, { signal: this.signal });
    this.places ??= this.#frame(job);
    this.#drawHead(job);
    put(this.places.stand, standing(job));
    await Promise.all([this.#why(job), this.#plan(job), this.#events(), this.history.refresh(job)]);
  }

  failed(error) {
    if (this.places) put(this.places.refused, error && problemNote(error));
    else showProblem(this.root, error);
  }

  #frame(job) {
    const names = ["head", "levers", "refused", "stand", "why", "plan", "events"];
    const places = Object.fromEntries(names.map((name) => [name, el("div")]));
    places.levers.className = "row";
    this.history = new JobHistory(this.path, this.signal);
    put(
      this.root,
      el("div", { class: "head" }, el("div", { class: "grow" }, places.head), places.levers),
      el("div", { class: "stack" }, places.refused, el("div", { class: "columns" },
        el("div", { class: "stack" }, places.why, places.plan, this.history.place, logCard(job, this.path, this.signal)),
        el("div", { class: "stack" }, places.stand, card("What happened", places.events)))),
    );
    return places;
  }

  #drawHead(job) {
    const line = el("p", { class: "row muted" }, badge(job.state), `since ${time(job.state_since_s)}`, job.message && `· ${job.message}`);
    put(this.places.head, el("p", { class: "small" }, el("a", { href: "#/jobs" }, "Jobs")), el("h1", {}, job.name), line);
    const state = JSON.stringify([job.state, job.intent, job.gpus]);
    if (state === this.leverState) return;
    this.leverState = state;
    const options = { refused: this.places.refused, acted: () => this.again() };
    const levers = jobLevers(job);
    const scaling = levers.length ? el("button", { type: "button", on: { click: () => scale(job, options) } }, "Scale") : null;
    put(this.places.levers, scaling, levers.map((lever) => leverButton(lever, options)));
  }

  async #why(job) {
    const isPlain = ["succeeded", "cancelled"].includes(job.state);
    const told = isPlain ? null : await get(`${this.path}/explanation`, { signal: this.signal });
    put(this.places.why, told && whyCard(told, job));
  }

  async #plan(job) {
    if (!job.plan) {
      const why = job.state === "planning" ? "The solver is looking for its plans." : "It gets a plan with its first GPUs.";
      put(this.places.plan, card("Parallel plan", el("p", { class: "muted" }, why)));
      return;
    }
    const key = `${job.generation} ${job.plan} ${Object.keys(job.nodes).length > 0}`;
    if (key === this.planKey) return; // drawn already
    const plan = await get(`${this.path}/plan`, { signal: this.signal });
    this.planKey = key;
    put(this.places.plan, card(["Parallel plan", el("span", { class: "muted small" }, job.plan)], planDrawing(plan, plan.inspection)));
  }

  async #events() {
    let page;
    do {
      const after = this.events.at(-1)?.number ?? 0;
      page = await get(`${this.path}/events`, { query: { after, limit: EVENTS_AT_ONCE }, signal: this.signal });
      this.events.push(...page.items);
    } while (page.next);
    redraw(this.places.events, String(this.events.length), () => eventSteps(this.events));
  }
}

function whyCard(told, job) {
  const isWaiting = ["queued", "planning", "submitted", "preempted", "suspended"].includes(job.state);
  const holders = Object.entries(told.holders).sort((a, b) => b[1] - a[1]).slice(0, 5);
  const links = holders.flatMap(([id, held], at) => [at ? ", " : "", el("a", { href: `#/jobs/${id}` }, id), ` (${held})`]);
  const start = told.expected_start_s;
  const rows = facts([
    ["Place in the queue", isWaiting && told.position],
    ["Needs", isWaiting && `${gpus(told.needed_gpus)}; ${count(told.free_gpus)} that it could use are free`],
    ["Held by others", isWaiting && holders.length ? el("span", {}, links) : null],
    ["Expected start", start && `${time(start)} (${ago(start, Date.now() / 1000)})`],
    ["Would start it at once", told.unblocks],
    ["At the next tick", told.next && told.next.reason.detail],
  ]);
  const heading = isWaiting ? "Why it waits" : "Why it is where it is";
  return card([heading, told.reason && el("span", { class: "muted small" }, told.reason.code)], el("p", {}, told.summary), rows.children.length ? rows : null);
}

function standing(job) {
  const { progress, account, memory } = job;
  const done = progress.fraction === null ? null : percent(progress.fraction);
  const nodes = Object.entries(job.nodes).map(([node, indices]) => `${node} (${indices.length})`).join(", ");
  return card(
    "Now",
    done && bar(`${done} done`, [["training", progress.fraction]]),
    facts([
      ["Progress", `${count(Math.floor(progress.steps))}${progress.steps_total ? ` of ${count(progress.steps_total)}` : ""} steps${done ? `, ${done}` : ""}`],
      ["Left", progress.remaining_s === null ? null : `${duration(progress.remaining_s)} at this speed`],
      ["GPUs", `${count(job.gpus.target)}, may hold ${job.gpus.min} to ${job.gpus.max}`],
      ["Leaving", job.gpus.releasing ? gpus(job.gpus.releasing) : null],
      ["Nodes", nodes],
      ["Step", progress.step_time_s === null ? null : duration(progress.step_time_s)],
      ["Throughput", progress.samples_per_s === null ? null : `${figure(progress.samples_per_s)} samples/s, measured`],
      ["Loss", progress.loss === null ? null : figure(progress.loss)],
      ["Memory", progress.peak_bytes === null ? null : `${bytes(progress.peak_bytes)} at the most on a GPU, measured`],
      ["Died of memory", memory.deaths.length ? plural(memory.deaths.length, "time") : null],
      ["Checkpoint", progress.checkpoint_steps ? `at step ${count(progress.checkpoint_steps)}` : "none yet"],
      ["Frozen layers", progress.frozen_layers || null],
      ["Queue", `${job.queue}, priority ${job.priority}`],
      ["Owner", job.owner || "nobody named"],
      ["Submitted", time(job.submitted_at_s)],
      ["Waited", duration(account.waited_s)],
      ["Computed", `${figure(account.gpu_s / 3600)} GPU hours${account.lost_gpu_s ? `, of which ${figure(account.lost_gpu_s / 3600)} were lost` : ""}`],
      ["Changes", `${plural(account.resizes, "resize")}, ${plural(account.preemptions, "preemption")}, ${plural(account.failures, "failure")}`],
      ["Id", el("code", {}, job.id)],
    ]),
  );
}
