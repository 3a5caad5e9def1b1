// What a rank prints: its last lines, and what it prints from now on.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { card, el, put } from "../dom.js";
import { follow } from "../stream.js";

const TAIL_LINES = 200;
const LINES_MAX = 1000;

export function logCard(job, path, signal) {
  const log = el("pre", { class: "log", tabindex: "0", role: "log", "aria-label": "Lines of the log" });
  const place = el("div", { class: "stack" });
  const rank = el("input", { id: "rank", type: "number", min: 0, step: 1, value: 0 });
  const told = el("p", { class: "small muted" });
  let current = new AbortController();
  const add = (text) => {
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
    log.append(`${text}\n`);
    while (log.childNodes.length > LINES_MAX) log.firstChild.remove();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
  const open = async () => {
    current.abort();
    current = new AbortController();
    signal.addEventListener("abort", () => current.abort());
    put(log);
    try {
      const page = await get(`${path}/logs`, { query: { rank: rank.value, tail: TAIL_LINES }, signal: current.signal });
      put(place, log, told);
      for (const line of page.items) add(line.text);
      told.textContent = page.items.length ? `The last lines of rank ${rank.value}, and what it prints from now on.` : "It has printed nothing yet.";
      const url = `${path}/logs?rank=${rank.value}&cursor=${encodeURIComponent(page.resume)}`;
      await follow(url, { heard: (event) => event.type === "message" && add(event.data.text), signal: current.signal });
    } catch (error) {
      if (!current.signal.aborted) put(place, error.status === 404 ? el("p", { class: "muted" }, error.message) : problemNote(error));
    }
  };
  rank.addEventListener("change", open);
  open();
  const choice = el("label", { class: "row small", for: "rank" }, "Rank", rank);
  return card(["Log", choice], place);
}
