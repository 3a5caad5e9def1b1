// Pending jobs with their reasons, and the usage of queues.

import { get, Unreachable } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, card, el, empty, redraw, table } from "../dom.js";
import { count, plural, range, words } from "../format.js";
import { queueBar } from "../queue_use.js";
import { age, due } from "../times.js";

const REASONS_EVERY_MS = 3000;
const WAITING_MAX = 5;
const WAITING = "queued,planning,submitted,preempted";
const FOR = {
  WaitingForPlan: "waiting for a plan",
  BackingOff: "backing off after a failure",
  NoFeasiblePlan: "without a feasible plan",
  InsufficientGpus: "waiting for free GPUs",
  NoMatchingFlavor: "without matching GPUs",
  WaitingForPreemptedWorkloads: "waiting for preempted jobs to leave",
  BehindHeadOfQueue: "behind the head of the queue",
  WaitingForQuota: "waiting for quota",
  ExceedsMaxQuota: "above their queue's limit",
};

/** The jobs that have been pending longest. Reasons are loaded separately, so that they do not delay the overview. */
export class WaitingCard {
  constructor(signal) {
    this.signal = signal;
    this.place = el("div", { class: "stack" });
    this.overview = null;
    this.why = null;
    this.failure = null;
    this.reasons = {};
    this.askedAtMs = -Infinity;
    this.isAsking = false;
    const all = el("a", { href: `#/jobs?state=${encodeURIComponent(WAITING)}`, class: "small" }, "All pending jobs");
    this.card = card(["Pending jobs", all], this.place);
  }

  update(overview) {
    this.overview = overview;
    this.#draw();
    const isDue = performance.now() - this.askedAtMs > REASONS_EVERY_MS;
    if (overview.waiting.length && isDue && !this.isAsking) this.#ask();
  }

  async #ask() {
    this.isAsking = true;
    try {
      const { items, reasons } = await get("/v1/waiting", { signal: this.signal });
      this.why = new Map(items.map((each) => [each.id, each]));
      this.reasons = reasons;
      this.failure = null;
      this.#draw();
    } catch (error) {
      const isTold = this.signal.aborted || error instanceof Unreachable; // the connection status shows it
      this.failure = isTold ? this.failure : error;
      this.#draw();
    }
    this.askedAtMs = performance.now();
    this.isAsking = false;
  }

  #draw() {
    if (this.failure && this.overview.waiting.length) {
      redraw(this.place, String(this.failure), () => problemNote(this.failure));
      return;
    }
    const { jobs, queues } = this.overview;
    const waiting = this.overview.waiting.slice(0, WAITING_MAX);
    const more = queues.reduce((sum, queue) => sum + queue.waiting_jobs, 0) - waiting.length;
    const why = waiting.map((job) => (this.why ? this.why.get(job.id) : { reason: { detail: "…" } }));
    redraw(this.place, JSON.stringify([waiting, why, this.reasons, jobs.running, more]), () => {
      if (!waiting.length) return noPendingJobs(jobs.running || 0);
      const rows = waiting.map((job, at) => waitingRow(job, why[at]));
      const list = el("ol", { class: "waiting", "aria-label": "Longest pending jobs" }, rows);
      return [this.#counts(), list, more > 0 && el("p", { class: "small muted" }, `and ${plural(more, "more job")}`)];
    });
  }

  #counts() {
    const most = Object.entries(this.reasons).sort((a, b) => b[1] - a[1]);
    if (!most.length) return null;
    const counts = most.map(([code, number]) => `${count(number)} ${FOR[code] ?? words(code).toLowerCase()}`);
    return el("p", { class: "small muted" }, counts.join(", "));
  }
}

function waitingRow(job, why) {
  const asked = `${range(job.min_gpus, job.max_gpus)} ${job.max_gpus === 1 ? "GPU" : "GPUs"}`;
  const start = why?.expected_start_s;
  return el(
    "li",
    {},
    el("p", { class: "row" }, el("a", { href: `#/jobs/${job.id}`, title: job.id }, job.name), badge(job.state)),
    el("p", { class: "small muted" }, `${asked}, for `, age(job.submitted_at_s, "for")),
    el("p", { class: "small" }, why?.reason ? why.reason.detail : unexplained(job, why)),
    start ? el("p", { class: "small muted" }, "Expected to start at ", due(start)) : null,
  );
}

function unexplained(job, why) {
  if (job.state === "planning") return "The solver is computing its plans.";
  return why ? "The next tick considers it." : "It was just submitted.";
}

function noPendingJobs(running) {
  const text = running ? `${plural(running, "job")} running.` : "Submit a job to see it planned and placed.";
  return empty("No pending jobs", text, el("a", { href: "#/submit", class: "button" }, "Submit a job"));
}

export function queueTable(overview) {
  if (!overview.queues.length) return null;
  const asks = (queue) => queue.used_gpus + queue.waiting_gpus;
  const busiest = [...overview.queues].sort((a, b) => asks(b) - asks(a)).slice(0, 8);
  const figures = (queue) => [queue.used_gpus, queue.running_jobs, queue.waiting_jobs].map(count);
  const rows = busiest.map((queue) => [queueLink(queue), queueBar(queue), ...figures(queue)]);
  const columns = [["Queue"], ["Usage"], ["GPUs", true], ["Running", true], ["Pending", true]];
  const more = overview.queues.length - busiest.length;
  const others = more > 0 && el("p", { class: "small muted" }, `and ${plural(more, "less busy queue")}`);
  return card("Queues", table("Queues and their usage", columns, rows), others);
}

function queueLink(queue) {
  return el("a", { href: `#/queues/${encodeURIComponent(queue.name)}` }, queue.name);
}
