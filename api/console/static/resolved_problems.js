// The card of problems that have ended, on the alerts page.

import { get } from "./api.js";
import { card, el, empty, put, redraw, say } from "./dom.js";
import { plural } from "./format.js";
import { causeLink, severityMark } from "./problem_strip.js";
import { extentOf, PERIODS, periodOf } from "./problem_spans.js";
import { age, when } from "./times.js";

const SHOWN_MAX = 30;

/** The card. */
export class ResolvedProblems {
  /** @param {AbortSignal} signal */
  constructor(signal) {
    this.signal = signal;
    this.period = PERIODS[0];
    this.showsAll = false;
    this.count = el("span", { class: "small muted" });
    this.list = el("div", {});
    this.place = card(["Resolved", this.count], this.#periods(), this.list);
  }

  /** Loads the problems that ended in the period, and shows them. */
  async refresh() {
    const { period } = this;
    const since = Math.max(0, Math.floor(Date.now() / 1000) - period.seconds);
    const { resolved } = await get("/v1/problems", { query: { resolved_since_s: since }, signal: this.signal });
    if (period !== this.period) return; // another period was chosen meanwhile
    this.resolved = resolved;
    this.#draw();
  }

  #periods() {
    const choose = async (event) => {
      this.period = periodOf(event.target.value);
      await this.refresh().catch(() => {}); // the page reports the next failure
    };
    const options = PERIODS.map((period) => {
      const box = { type: "radio", name: "resolved-period", value: period.key, checked: period === this.period };
      return el("label", {}, el("input", { ...box, on: { change: choose } }), el("span", {}, period.name));
    });
    return el("fieldset", { class: "segments" }, el("legend", { class: "unseen" }, "Ended in the last"), options);
  }

  #draw() {
    const { resolved } = this;
    say(this.count, resolved.length ? plural(resolved.length, "problem") : "");
    const shown = this.showsAll ? resolved : resolved.slice(0, SHOWN_MAX);
    const key = JSON.stringify([shown, resolved.length, this.period.key]);
    redraw(this.list, key, () => {
      if (!resolved.length) return [empty(`No problem ended in the last ${this.period.name}`)];
      const rows = shown.map(entry);
      const list = el("ol", { class: "problem-list resolved", "aria-label": "Resolved problems" }, rows);
      return [list, resolved.length > shown.length && this.#more(resolved.length)];
    });
  }

  #more(number) {
    const showAll = () => {
      this.showsAll = true;
      this.#draw();
      this.list.querySelector("a")?.focus();
    };
    return el("button", { type: "button", on: { click: showAll } }, `Show all ${number}`);
  }
}

function entry(problem) {
  const times = el("p", { class: "help" }, el("span", {}, when(problem.begin_s), " to ", when(problem.end_s), ", ",
    el("strong", {}, extentOf(problem))));
  const ending = el("p", { class: "help" }, problem.ending);
  const text = el("div", {}, el("p", { class: "cause" }, causeLink(problem)), ending, times);
  const ended = el("span", { class: "since" }, "ended ", age(problem.end_s));
  return el("li", { data: { severity: problem.severity, code: problem.code } }, severityMark(problem.severity), text,
    ended);
}
