// Who waits and why, and what queues use.

import { get, Unreachable } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, bar, card, el, empty, redraw, table } from "../dom.js";
import { count, gpus, plural, range, words } from "../format.js";
import { age, due } from "../times.js";

const REASONS_EVERY_MS = 3000;
const WAITING_MAX = 5;
const WAITING = "queued,planning,submitted,preempted";
const FOR = {
  WaitingForPlan: "for a plan",
  BackingOff: "after a failure",
  NoFeasiblePlan: "without a plan that fits",
  InsufficientGpus: "for free GPUs",
  NoMatchingFlavor: "for GPUs that are not there",
  WaitingForPreemptedWorkloads: "for others to leave",
  BehindHeadOfQueue: "behind the head of the queue",
  WaitingForQuota: "for their queue's quota",
  ExceedsMaxQuota: "for more than their queue's limit",
};

/** Those who have waited longest. Why they do is asked for beside the overview, which does not wait for the answer. */
export class WaitingCard {
  constructor(signal) {
    this.signal = signal;
    this.place = el("div", { class: "stack" });
    this.told = null;
    this.why = null;
    this.failure = null;
    this.reasons = {};
    this.askedAtMs = -Infinity;
    this.isAsking = false;
    const all = el("a", { href: `#/jobs?state=${encodeURIComponent(WAITING)}`, class: "small" }, "All that wait");
    this.card = card(["Waiting", all], this.place);
  }

  update(told) {
    this.told = told;
    this.#draw();
    const isDue = performance.now() - this.askedAtMs > REASONS_EVERY_MS;
    if (told.waiting.length && isDue && !this.isAsking) this.#ask();
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
      const isTold = this.signal.aborted || error instanceof Unreachable; // the connection says so itself
      this.failure = isTold ? this.failure : error;
      this.#draw();
    }
    this.askedAtMs = performance.now();
    this.isAsking = false;
  }

  #draw() {
    if (this.failure && this.told.waiting.length) {
      redraw(this.place, String(this.failure), () => problemNote(this.failure));
      return;
    }
    const { jobs, queues } = this.told;
    const waiting = this.told.waiting.slice(0, WAITING_MAX);
    const more = queues.reduce((sum, queue) => sum + queue.waiting_jobs, 0) - waiting.length;
    const why = waiting.map((job) => (this.why ? this.why.get(job.id) : { reason: { detail: "…" } }));
    redraw(this.place, JSON.stringify([waiting, why, this.reasons, jobs.running, more]), () => {
      if (!waiting.length) return nobodyWaits(jobs.running || 0);
      const rows = waiting.map((job, at) => waitingRow(job, why[at]));
      const list = el("ol", { class: "waiting", "aria-label": "Jobs that have waited longest" }, rows);
      return [this.#counts(), list, more > 0 && el("p", { class: "small muted" }, `and ${plural(more, "job")} more`)];
    });
  }

  #counts() {
    const most = Object.entries(this.reasons).sort((a, b) => b[1] - a[1]);
    if (!most.length) return null;
    const told = most.map(([code, number]) => `${count(number)} ${FOR[code] ?? words(code).toLowerCase()}`);
    return el("p", { class: "small muted" }, told.join(", "));
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
  if (job.state === "planning") return "The solver is looking for its plans.";
  return why ? "Its turn comes at the next tick." : "It has just come.";
}

function nobodyWaits(running) {
  const told = running ? `${plural(running, "job")} running.` : "Submit a job to see it planned and placed.";
  return empty("Nobody waits", told, el("a", { href: "#/submit", class: "button" }, "Submit a job"));
}

export function queueTable(told) {
  if (!told.queues.length) return null;
  const asks = (queue) => queue.used_gpus + queue.waiting_gpus;
  const busiest = [...told.queues].sort((a, b) => asks(b) - asks(a)).slice(0, 8);
  const figures = (queue) => [queue.used_gpus, queue.running_jobs, queue.waiting_jobs].map(count);
  const rows = busiest.map((queue) => [queue.name, use(queue), ...figures(queue)]);
  const columns = [["Queue"], ["Use"], ["GPUs", true], ["Run", true], ["Wait", true]];
  const more = told.queues.length - busiest.length;
  const others = more > 0 && el("p", { class: "small muted" }, `and ${plural(more, "queue")} more that use less`);
  return card("Queues", table("Queues and what they use", columns, rows), others);
}

/** What it uses of its limit, or else of what it is guaranteed. */
function use(queue) {
  const whole = Math.max(1, queue.limit_gpus ?? 0, queue.guaranteed_gpus, queue.used_gpus);
  const limit = queue.limit_gpus === null ? "no limit" : `at most ${queue.limit_gpus}`;
  const own = `${gpus(queue.own_gpus)} of its own, ${queue.borrowed_gpus} borrowed`;
  const told = `${own}; ${queue.guaranteed_gpus} guaranteed, ${limit}`;
  const shown = bar(told, [["training", queue.own_gpus / whole], ["borrowed", queue.borrowed_gpus / whole]]);
  shown.title = told;
  return shown;
}
