// Job history: allocation, loss and throughput over time, and its events.

import { get, Problem } from "../api.js";
import { badge, card, el, empty, put } from "../dom.js";
import { arrows, plural, words } from "../format.js";
import { chart } from "../plotting.js";
import { when } from "../times.js";

const STEPS_MAX = 60;
const NOTHING = "GPUs, loss and throughput over time appear here once the job has run.";
const STATES = "submitted|planning|queued|starting|running|resizing|preempted|suspended|succeeded|failed|cancelled";

export class JobHistory {
  /** `runs` draws the timeline and the failed runs of the same data. */
  constructor(path, signal, runs) {
    this.path = path;
    this.signal = signal;
    this.runs = runs;
    this.place = el("div", { class: "stack" });
    this.plots = new Map();
  }

  async refresh(job) {
    let history;
    try {
      history = await get(`${this.path}/history`, { signal: this.signal });
    } catch (error) {
      if (!(error instanceof Problem && error.status === 404)) throw error;
      put(this.place, card("History", el("p", { class: "muted" }, "This service does not store job history.")));
      return;
    }
    this.runs.draw(job, history);
    const newestS = Math.max(...[...history.allocations, ...history.samples].map((each) => each.at_s));
    const hasEnded = ["succeeded", "failed", "cancelled"].includes(job.state);
    const untilS = Math.max(newestS, hasEnded ? job.state_since_s : Date.now() / 1000);
    this.span = [history.allocations[0]?.at_s ?? untilS - 1, untilS];
    if (history.allocations.some((step) => step.gpus)) this.#allocation(history.allocations, untilS);
    this.#samples(history.samples);
    const cards = [...this.plots.values()].map((plot) => plot.card);
    if (!cards.length) cards.push(card("History", empty("No data yet", NOTHING)));
    if (cards.some((each) => each.parentNode !== this.place)) put(this.place, cards);
  }

  #allocation(steps, untilS) {
    const rows = [...steps, { ...steps.at(-1), at_s: untilS }];
    const series = [
      { label: "Held", colour: "training", stepped: true, fill: "accent-soft" },
      { label: "of which lent", colour: "lent", stepped: true, dash: [5, 3] },
    ];
    const columns = ["at_s", "gpus", "lent_gpus"].map((name) => rows.map((row) => row[name]));
    const spec = { label: "GPUs held over time", unit: "GPUs", series };
    this.#plot("Allocation", spec).update(columns, undefined, this.span);
  }

  #samples(samples) {
    const draw = (name, title, spec) => {
      const history = samples.filter((sample) => sample[name] !== null);
      if (!history.length) return;
      const columns = ["at_s", name, "steps"].map((column) => history.map((sample) => sample[column]));
      const step = { label: "Step", unit: "", apart: true };
      const [line] = spec.series;
      const series = [{ ...line, label: title, points: history.length < 2 }, step];
      this.#plot(title, { label: `${title} over time`, ...spec, series }).update(columns, undefined, this.span);
    };
    draw("loss", "Loss", { series: [{ colour: "recalled" }], fromZero: false });
    draw("samples_per_s", "Throughput", { series: [{ colour: "inference" }], unit: "samples/s" });
  }

  #plot(title, spec) {
    if (!this.plots.has(title)) {
      const body = el("div", {});
      const whole = { height: 170, together: this.path, ...spec };
      this.plots.set(title, { card: card(title, body), drawn: chart(body, whole, this.signal) });
    }
    return this.plots.get(title).drawn;
  }
}

/** Renders a job's events, newest first. */
export function eventSteps(events) {
  if (!events.length) return empty("No events yet");
  const shown = events.slice(-STEPS_MAX).reverse();
  const more = events.length - shown.length;
  const others = more > 0 ? el("p", { class: "small muted" }, `and ${plural(more, "earlier event")}`) : null;
  return el("div", { class: "stack" }, el("ol", { class: "steps" }, shown.map(eventStep)), others);
}

/** A state change has the message "before -> after: reason". The step is marked with the state after it. */
function eventStep(event) {
  const after = event.code === "JobState" ? event.message.split("->").at(-1) : "";
  const state = new RegExp(`\\b(${STATES})\\b`).exec(after)?.[1];
  const what = state ? badge(state) : el("strong", {}, words(event.code));
  const at = when(event.at_s, { class: "muted" });
  return el("li", { data: { state: state ?? "idle" } }, at, what, el("span", {}, arrows(event.message)));
}
