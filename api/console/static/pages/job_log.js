// Log of one rank: its last lines, and new lines as they arrive.

import { get, Problem } from "../api.js";
import { problemNote } from "../dialogs.js";
import { card, copyButton, el, put } from "../dom.js";
import { follow } from "../stream.js";

const TAIL_LINES = 200;
const LINES_MAX = 1000;
const ENDED = ["succeeded", "failed", "cancelled"];
const END_PX = 30;

export function logCard(job, path, signal) {
  // Not a live region: training prints for days, which would flood screen readers.
  const log = el("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log lines" });
  const place = el("div", { class: "stack" });
  const rank = el("input", { id: "rank", type: "number", min: 0, max: job.gpus.max - 1, step: 1, value: 0 });
  const status = el("p", { class: "small muted" });
  let current = new AbortController();
  const add = (text) => {
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < END_PX;
    log.append(`${text}\n`);
    while (log.childNodes.length > LINES_MAX) log.firstChild.remove();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
  const open = async () => {
    current.abort();
    const mine = new AbortController();
    current = mine;
    put(log);
    const number = rank.value || "0";
    try {
      const page = await get(`${path}/logs`, { query: { rank: number, tail: TAIL_LINES }, signal: mine.signal });
      put(place, log, status);
      for (const line of page.items) add(line.text);
      log.scrollTop = log.scrollHeight;
      const isLive = !ENDED.includes(job.state);
      status.textContent = words(number, page.items.length, isLive);
      const url = `${path}/logs?rank=${number}&cursor=${encodeURIComponent(page.resume)}`;
      const heard = (event) => {
        if (event.type !== "message") return;
        add(event.data.text);
        status.textContent = words(number, 1, isLive);
      };
      await follow(url, { heard, signal: mine.signal });
      if (!mine.signal.aborted) status.textContent = words(number, log.childNodes.length, false);
    } catch (error) {
      const none = () => el("p", { class: "muted" }, error.message);
      const isMissing = error instanceof Problem && error.status === 404;
      if (!mine.signal.aborted) put(place, isMissing ? none() : problemNote(error));
    }
  };
  signal.addEventListener("abort", () => current.abort());
  rank.addEventListener("change", open);
  open();
  const choice = el("label", { class: "row small", for: "rank" }, "Rank", rank);
  return card(["Log", el("span", { class: "row" }, choice, copyButton("the log", () => log.textContent))], place);
}

function words(rank, lines, isLive) {
  if (!lines) return isLive ? `Rank ${rank} has printed nothing yet.` : `Rank ${rank} has printed nothing.`;
  return isLive ? `Last lines of rank ${rank}; new lines are added.` : `Last lines of rank ${rank}.`;
}
