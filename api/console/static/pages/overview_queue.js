// Who waits, what queues use, and the newest events.

import { get } from "../api.js";
import { badge, bar, card, el, empty, put, table } from "../dom.js";
import { arrows, count, duration, gpus, plural, time } from "../format.js";
import { onEvent } from "../live.js";

const FEED_MAX = 10;
const COLOURS = { Node: "lent", Loan: "lent", Job: "training", Breach: "recalled" };

export function waitingTable(told) {
  if (!told.waiting.length) {
    const running = told.jobs.running || 0;
    return empty("Nobody waits", running ? `${plural(running, "job")} running.` : "Submit a job to see it planned and placed.", el("a", { href: "#/submit", class: "button" }, "Submit a job"));
  }
  const rows = told.waiting.map((job) => [
    el("a", { href: `#/jobs/${job.id}`, title: "Why does it wait?" }, job.name),
    badge(job.state),
    `${job.min_gpus}–${job.max_gpus}`,
    duration(Math.max(0, Math.round(told.now_s - job.submitted_at_s))),
  ]);
  return table("Jobs that have waited longest", [["Job"], ["State"], ["GPUs", true], ["For", true]], rows);
}

export function queueTable(told) {
  if (!told.queues.length) return null;
  const busiest = [...told.queues].sort((a, b) => b.used_gpus + b.waiting_gpus - a.used_gpus - a.waiting_gpus).slice(0, 8);
  const rows = busiest.map((queue) => [queue.name, use(queue), count(queue.used_gpus), count(queue.running_jobs), count(queue.waiting_jobs)]);
  const more = told.queues.length - busiest.length;
  return card("Queues", table("Queues and what they use", [["Queue"], ["Use"], ["GPUs", true], ["Run", true], ["Wait", true]], rows), more > 0 ? el("p", { class: "small muted" }, `and ${plural(more, "queue")} more that use less`) : null);
}

function use(queue) {
  const whole = Math.max(1, queue.limit_gpus ?? 0, queue.guaranteed_gpus, queue.used_gpus);
  const told = `${gpus(queue.own_gpus)} of its own, ${queue.borrowed_gpus} borrowed, ${queue.guaranteed_gpus} guaranteed`;
  const shown = bar(told, [["training", queue.own_gpus / whole], ["borrowed", queue.borrowed_gpus / whole]]);
  shown.title = told;
  return shown;
}

/** The newest events, newest first; what comes is put on top. */
export function feed(signal) {
  const place = el("div", {});
  const list = el("ol", { class: "feed" });
  let newest = null;
  const add = (event, isFresh) => {
    if (newest !== null && event.number <= newest) return;
    newest = event.number;
    list.prepend(entry(event, isFresh));
    while (list.children.length > FEED_MAX) list.lastChild.remove();
    if (list.parentNode !== place) put(place, list);
  };
  onEvent((event) => event && newest !== null && add(event, true), signal);
  const refresh = async (told) => {
    if (newest !== null && newest >= told.newest_event) return;
    const after = Math.max(newest ?? 0, told.newest_event - FEED_MAX);
    const { items } = await get("/v1/events", { query: { after, limit: FEED_MAX }, signal });
    newest ??= 0;
    items.forEach((event) => add(event, false));
    if (!list.children.length) put(place, empty("Nothing has happened yet"));
  };
  return { place, refresh };
}

function entry(event, isFresh) {
  const kind = /^[A-Z][a-z]+/.exec(event.code)[0];
  const subject = event.code.startsWith("Job") ? el("a", { href: `#/jobs/${event.subject}` }, event.subject) : el("strong", {}, event.subject);
  const rest = event.message.slice(event.subject.length);
  const told = event.message.startsWith(event.subject) && /^[:, ]/.test(rest) ? rest.replace(/^[:,]?\s*/, "") : event.message;
  const when = el("time", { datetime: new Date(1000 * event.at_s).toISOString() }, time(event.at_s));
  return el("li", { class: isFresh ? "fresh" : null }, when, el("p", {}, el("span", { class: "badge", data: { state: COLOURS[kind] || "idle" } }, subject), " ", arrows(told)));
}
