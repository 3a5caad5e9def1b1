// Cards of a job's life: the strip of states, GPUs and plans, and each failed run with its last lines.

import { get, Problem } from "../api.js";
import { card, el, put, redraw } from "../dom.js";
import { duration, plural, time } from "../format.js";
import { failedRuns, timelineLanes } from "../job_timeline.js";
import { when } from "../times.js";

const LAST_LINES = 20;
const ENDED = ["succeeded", "failed", "cancelled"];
const NARROW_SHARE = 0.07;

/** `openRun(generation)` shows the log of a run. */
export class JobRuns {
  constructor(path, signal, openRun) {
    this.path = path;
    this.signal = signal;
    this.openRun = openRun;
    this.place = el("div", { class: "stack" });
    this.strip = el("div", {});
    this.failures = el("div", {});
    put(this.place, this.strip, this.failures);
  }

  /** Draws the history of a job. */
  draw(job, { states, allocations }) {
    const hasEnded = ENDED.includes(job.state);
    const endS = hasEnded ? job.state_since_s : Date.now() / 1000;
    const lanes = timelineLanes(states, allocations, { endS, hasEnded });
    put(this.strip, lanes.length ? card("Timeline", timeline(lanes)) : null);
    const failed = failedRuns(states, allocations).reverse();
    redraw(this.failures, JSON.stringify(failed), () => failed.length > 0 && this.#failuresCard(failed));
  }

  #failuresCard(failed) {
    const items = failed.map((run, at) => this.#failure(run, failed.length - at, at === 0));
    return card(["Failed runs", el("span", { class: "small muted" }, plural(failed.length, "run"))],
      el("ol", { class: "failures", reversed: true }, items));
  }

  #failure(run, number, isOpen) {
    const outcome = run.isRetried ? "retried" : "the job failed";
    const head = el("summary", {}, el("strong", {}, run.cause || "its workers failed"),
      el("span", { class: "muted" }, when(run.atS), `, after ${duration(Math.round(run.ranS))}; ${outcome}`));
    const lines = el("pre", { class: "small" }, run.lines.join("\n"));
    const open = () => this.openRun(run.generation);
    const button = run.generation !== null && el("button", { type: "button", on: { click: open } }, "Open its log");
    const details = el("details", { open: isOpen }, head, el("div", { class: "stack" }, lines, button));
    const load = () => {
      if (!details.open || run.lines.length || lines.dataset.is) return;
      lines.dataset.is = "loaded";
      this.#lastLines(run.generation).then((text) => put(lines, text));
    };
    details.addEventListener("toggle", load);
    load();
    return el("li", { value: number, data: { state: run.isRetried ? "queued" : "failed" } }, details);
  }

  async #lastLines(generation) {
    try {
      const query = { generation, rank: 0, tail: LAST_LINES };
      const { items } = await get(`${this.path}/logs`, { query, signal: this.signal });
      return items.map((line) => line.text).join("\n") || "Rank 0 has printed nothing.";
    } catch (error) {
      return error instanceof Problem ? error.message : "The log could not be read.";
    }
  }
}

function timeline(lanes) {
  const [[, first]] = lanes;
  const from = first[0]?.fromS;
  const to = first.at(-1)?.toS;
  const drawn = lanes.filter(([, spans]) => spans.length).map(([name, spans]) => lane(name, spans));
  const ends = from && el("div", { class: "axis" }, el("span", {}, time(from)), el("span", {}, time(to)));
  return [
    el("div", { class: "life" }, drawn, el("div", { class: "lane", "aria-hidden": "true" }, el("span"), ends)),
    el("details", {}, el("summary", {}, "Timeline as a list"), el("ul", { class: "small" }, lanes.flatMap(listed))),
  ];
}

function lane(name, spans) {
  const label = `${name}: ${spans.map((span) => span.label).slice(-6).join(", then ")}`;
  const drawn = spans.map((span) => {
    const width = span.to - span.from;
    const height = span.share === undefined ? {} : { "--height": `${100 * span.share}%` };
    const lent = span.lentShare ? { "--lent-height": `${100 * (span.lentShare / span.share)}%` } : {};
    const vars = { "--from": `${100 * span.from}%`, "--width": `${100 * width}%`, ...height, ...lent };
    const title = `${span.label}, ${time(span.fromS)} to ${time(span.toS)} (${duration(span.toS - span.fromS)})`;
    return el("span", { class: "span", title, vars, data: span.state ? { state: span.state } : {} },
      width > NARROW_SHARE && el("span", {}, span.label));
  });
  return el("div", { class: "lane" }, el("span", {}, name),
    el("div", { class: `track lane-${name.toLowerCase()}`, role: "img", "aria-label": label }, drawn));
}

function listed([name, spans]) {
  return spans.map((span) => {
    return el("li", {}, `${name}: ${span.label}, from ${time(span.fromS)} for ${duration(span.toS - span.fromS)}`);
  });
}
