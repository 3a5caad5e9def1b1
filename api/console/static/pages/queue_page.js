// Queue page: quota and use, pending jobs with their reasons, members and usage by day, with levers.

import { get } from "../api.js";
import { badge, el, empty, facts, figureOf, table } from "../dom.js";
import { count, gpus, gpuTime, plural, range } from "../format.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { lacksRole, may, whoAmI } from "../permissions.js";
import { chart } from "../plotting.js";
import { queueActions } from "../queue_actions.js";
import { limitText, queueBar, unusedGuarantee } from "../queue_use.js";
import { eventRecord } from "../records.js";
import { age, due, when } from "../times.js";

const PENDING = "queued,planning,submitted,preempted";
const PENDING_MAX = 20;
const EVENTS = 20;
const TOKENS_MAX = 1000;
const DAYS = 30;
const DAY_S = 86_400;
const HOUR_S = 3600;
const SLOW_EVERY_MS = 30_000; // usage and members change slowly

const NOT_DECLARED = "The queue is not declared. Live jobs name it, and it has the limits of the queue default.";
const PENDING_COLUMNS = [["Job"], ["State"], ["GPUs", true], ["Reason"], ["Position", true], ["Expected start"],
  ["Waiting", true]];

export const title = (name) => `Queue ${name}`;

export async function show(root, { params, signal }) {
  const page = new QueuePage(root, params[0], signal);
  const wants = (event) => event.subject === page.name;
  page.again = keepUp(() => page.refresh(), { signal, wants, failed: page.frame.failedOrGone("#/queues") });
}

class QueuePage {
  again = async () => {}; // set once the page refreshes itself

  constructor(root, name, signal) {
    this.name = name;
    this.signal = signal;
    this.frame = new PageFrame(root, `Queue ${name}`, { back: { href: "#/queues", name: "Queues" } });
    this.figures = el("div");
    this.plot = el("div");
    this.sums = el("p", { class: "small muted" });
    this.usageChart = null;
    this.readAtMs = -Infinity;
  }

  async refresh() {
    const read = (path, query = {}) => get(path, { query, signal: this.signal });
    const who = await whoAmI();
    const [queue, waiting, events] = await Promise.all([
      read(`/v1/queues/${encodeURIComponent(this.name)}`),
      read("/v1/waiting", { queue: this.name, limit: PENDING_MAX }),
      read("/v1/events", { subject: this.name, order: "newest", limit: EVENTS }),
      this.#readSlowly(who),
    ]);
    const reasons = {
      changeReason: lacksRole(who, "queue-admin", this.name),
      deleteReason: lacksRole(who, "admin"),
    };
    this.frame.offer(queueActions(queue, reasons), () => this.again());
    this.#draw(queue, waiting, events.items, who);
  }

  async #readSlowly(who) {
    if (performance.now() - this.readAtMs < SLOW_EVERY_MS) return;
    const from = Math.floor(Date.now() / 1000) - DAYS * DAY_S;
    const [usage, tokens] = await Promise.all([
      get("/v1/usage", { query: { queue: this.name, by: "day", from }, signal: this.signal }),
      may(who, "admin") ? get("/v1/tokens", { query: { limit: TOKENS_MAX }, signal: this.signal }) : null,
    ]);
    this.usage = usage;
    this.members = tokens && tokens.items.filter((token) => isMember(token, this.name));
    this.readAtMs = performance.now();
  }

  #draw(queue, waiting, events, who) {
    const { frame } = this;
    const figures = useFigures(queue);
    if (figures.textContent !== this.figures.textContent) this.figures.replaceChildren(figures);
    const all = el("a", { class: "small", href: `#/jobs?queue=${encodeURIComponent(queue.name)}` }, "All live jobs");
    const pending = frame.section("Pending jobs", [waiting, queue.waiting_jobs],
      () => pendingJobs(waiting.items, queue), all);
    const quota = frame.section("Quota", queue, () => quotaFacts(queue));
    const members = frame.section("Members", [this.members, who.grants], () => memberTable(this.members, queue.name));
    const usage = frame.section("Usage by day", this.usage.items.length > 0, () =>
      this.usage.items.length ? [this.sums, this.plot] : noUsage());
    const changes = frame.section("Changes", events, () => eventRecord(events, "Changes of the quota appear here."));
    frame.fill(() => [this.figures, el("div", { class: "columns" },
      el("div", { class: "stack" }, pending, usage), el("div", { class: "stack" }, quota, members, changes))]);
    this.#drawUsage();
  }

  #drawUsage() {
    const { items, total } = this.usage;
    if (!items.length) return;
    const lost = total.lost_gpu_s >= 1 ? `, ${gpuTime(total.lost_gpu_s)} of work lost` : "";
    const lent = `${gpuTime(total.lent_gpu_s)} of them on lent nodes`;
    this.sums.textContent = `${gpuTime(total.gpu_s)} in ${DAYS} days, ${lent}${lost}`;
    const series = [
      { label: "All", colour: "training", stepped: true, fill: "accent-soft" },
      { label: "of which lent", colour: "lent", stepped: true, dash: [5, 3] },
    ];
    const spec = { label: "GPU-hours by day", unit: "GPU-hours", series, height: 200 };
    this.usageChart ??= chart(this.plot, spec, this.signal);
    const days = fillDays(items, this.usage.as_of_s);
    const columns = ["day", "gpu_s", "lent_gpu_s"].map((name) =>
      days.map((row) => (name === "day" ? row.day : row[name] / HOUR_S)));
    this.usageChart.update(columns, days.length - 2);
  }
}

/** Returns a row for each day from the first on, and a last one at `nowS` with the value of the current day. */
function fillDays(items, nowS) {
  const byDay = new Map(items.map((row) => [row.day, row]));
  const first = items[0].day;
  const number = Math.floor((nowS - first) / DAY_S) + 1;
  const rows = Array.from({ length: number }, (_, at) => {
    const day = first + at * DAY_S;
    return byDay.get(day) ?? { day, gpu_s: 0, lent_gpu_s: 0 };
  });
  return [...rows, { ...rows.at(-1), day: nowS }];
}

/** Returns whether a token can submit to, or administer, the queue. */
function isMember(token, queue) {
  return !token.revoked_at_s && token.grants.some((grant) => {
    const [, on = ""] = grant.split(":");
    return on === "" || on === queue;
  });
}

function useFigures(queue) {
  const unused = unusedGuarantee(queue);
  const lend = unused ? `${gpus(unused)} of it can be borrowed by others` : "all of it is in use";
  const limit = queue.limit_gpus === null ? "no limit" : `limit ${count(queue.limit_gpus)}`;
  const waiting = queue.waiting_jobs ? `at least ${gpus(queue.waiting_gpus)} requested` : "none";
  return el("dl", { class: "figures" }, [
    figureOf("training", "GPUs in use", count(queue.used_gpus), limit, plural(queue.running_jobs, "job")),
    figureOf("training", "Guaranteed", count(queue.guaranteed_gpus), "GPUs", queue.guaranteed_gpus ? lend : "none"),
    figureOf("borrowed", "Borrowed", count(queue.borrowed_gpus), "GPUs", "above its guarantee"),
    figureOf("queued", "Pending jobs", count(queue.waiting_jobs), "", waiting),
  ]);
}

function quotaFacts(queue) {
  return [
    queueBar(queue),
    !queue.declared && el("p", { class: "note" }, NOT_DECLARED),
    facts([
      ["Guaranteed", gpus(queue.guaranteed_gpus)],
      ["Limit", limitText(queue.limit_gpus)],
      ["Weight", String(queue.weight)],
      ["Limit per owner", limitText(queue.user_limit_gpus)],
      ["Pending jobs per owner", limitText(queue.user_jobs_max)],
      ["Highest priority", String(queue.priority_max)],
    ]),
  ];
}

function pendingJobs(jobs, queue) {
  if (!jobs.length) {
    const submit = el("a", { class: "button", href: "#/submit" }, "Submit a job");
    return empty("No pending jobs", "Jobs that wait for GPUs appear here with their reasons.", submit);
  }
  const row = (job) => [
    el("a", { href: `#/jobs/${job.id}`, title: job.id }, job.name),
    badge(job.state),
    range(job.min_gpus, job.max_gpus),
    el("span", { class: "reason" }, job.reason?.detail ?? "The next tick considers it."),
    job.position === null ? "–" : count(job.position),
    job.expected_start_s ? due(job.expected_start_s) : "–",
    age(job.submitted_at_s, "for"),
  ];
  const more = queue.waiting_jobs - jobs.length;
  const path = `#/jobs?queue=${encodeURIComponent(queue.name)}&state=${encodeURIComponent(PENDING)}`;
  return [
    table("Pending jobs of the queue", PENDING_COLUMNS, jobs.map(row)),
    more > 0 && el("p", { class: "small" }, el("a", { href: path }, `and ${plural(more, "more job")}`)),
  ];
}

function memberTable(members, queue) {
  if (members === null) return el("p", { class: "muted" }, "Only admins see the members of the queue.");
  const groups = el("p", { class: "small muted" }, "Groups of the identity provider can grant roles as well: see ",
    el("a", { href: "#/settings?name=oidc_groups" }, "the setting oidc_groups"), ".");
  if (!members.length) {
    const tokens = el("a", { class: "button", href: "#/tokens" }, "Create a token");
    return [empty("No tokens have a role on this queue", tokens), groups];
  }
  const rolesOf = (token) => token.grants.filter((grant) => !grant.includes(":") || grant.endsWith(`:${queue}`));
  const row = (token) => [
    token.name,
    rolesOf(token).join(", "),
    token.last_used_at_s ? when(token.last_used_at_s) : "never",
  ];
  return [table("Tokens with a role on the queue", [["Name"], ["Roles"], ["Last used"]], members.map(row)), groups];
}

function noUsage() {
  return empty("No usage yet", "GPU-hours by day appear here once jobs of the queue have run.");
}
