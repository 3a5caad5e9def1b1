// Controls of the demo: the time of the replayed day, and a surge of demand. Only the demo's service loads this module.

import "./app.js"; // first: it signs the browser in if the page was opened with a login URL
import { get, post } from "./api.js";
import { toast } from "./dialogs.js";
import { el, say } from "./dom.js";
import { dayTime, passedShare, surgeLeftS, surgeSentence } from "./demo_words.js";
import { count } from "./format.js";
import { keepUp } from "./live.js";

const EVERY_S = 1;
const NOTE = "A recorded day in fast motion. Nodes whose names begin with sim- are simulated; the others are real.";

const clock = el("strong", { class: "demo-clock" }, "");
const passed = el("progress", { max: 1, value: 0, "aria-label": "Passed part of the day" });
const news = el("p", { class: "demo-news", role: "status" }, "");
const button = el("button", { type: "button", on: { click: surge } }, "Surge now");
const note = el("p", { class: "muted" }, NOTE);
const bar = el("aside", { class: "demo", "aria-label": "Demo" },
  el("div", { class: "demo-day" }, el("span", { class: "badge" }, "Demo"), clock, passed),
  el("div", { class: "demo-text" }, note, news), button);

const again = keepUp(refresh, { signal: new AbortController().signal, everyS: EVERY_S, wants: () => false, failed });
document.body.append(bar);

async function refresh() {
  const day = await get("/v1/demo");
  const since = { since_s: day.surged_at_s, limit: 1000 };
  const receipts = day.surged_at_s === null ? [] : (await get("/v1/recalls", { query: since })).items;
  say(clock, dayTime(day));
  passed.value = passedShare(day);
  say(news, surgeSentence(day, receipts));
  note.hidden = news.textContent !== "";
  const left = surgeLeftS(day);
  say(button, left ? `Surge, ${count(Math.ceil(left))} s left` : "Surge now");
}

async function surge() {
  try {
    await post("/v1/demo/surge");
    await again();
  } catch (error) {
    failed(error);
  }
}

/** @param {Error | null} error */
function failed(error) {
  if (error) toast(error.message);
}
