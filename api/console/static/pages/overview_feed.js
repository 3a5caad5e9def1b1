// Live list of the newest events.

import { eventsAfter } from "../api.js";
import { el, empty, put } from "../dom.js";
import { arrows } from "../format.js";
import { onEvent } from "../live.js";
import { when } from "../times.js";

const FEED_MAX = 8;
const COLOURS = { Node: "lent", Loan: "lent", Job: "training", Breach: "recalled" };

/** Creates the list, newest event first. */
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
  const refresh = async (overview) => {
    if (newest !== null && newest >= overview.newest_event) return;
    const after = Math.max(newest ?? 0, overview.newest_event - FEED_MAX);
    const { items } = await eventsAfter(after, { path: "/v1/events", limit: FEED_MAX, signal });
    newest ??= 0;
    items.forEach((event) => add(event, false));
    if (!list.children.length) put(place, empty("No events yet"));
  };
  return { place, refresh };
}

function entry(event, isFresh) {
  const kind = /^[A-Z][a-z]+/.exec(event.code)[0];
  const isJob = event.code.startsWith("Job");
  const name = event.subject;
  const subject = isJob ? el("a", { href: `#/jobs/${name}` }, name) : el("strong", {}, name);
  const rest = event.message.slice(name.length);
  const isNamed = event.message.startsWith(name) && /^[:, ]/.test(rest);
  const text = isNamed ? rest.replace(/^[:,]?\s*/, "") : event.message;
  const mark = el("span", { class: "badge", data: { state: COLOURS[kind] || "idle" } }, subject);
  return el("li", { class: isFresh ? "fresh" : null }, when(event.at_s), el("p", {}, mark, " ", arrows(text)));
}
