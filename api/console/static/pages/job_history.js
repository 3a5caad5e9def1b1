// What a job has been through: allocation, loss and throughput over time, and its steps from state to state.

import { get, Problem } from "../api.js";
import { badge, card, el, empty, put } from "../dom.js";
import { arrows, plural, time, words } from "../format.js";
import { chart } from "../plotting.js";

const STEPS_MAX = 60;

export class JobHistory {
  constructor(path, signal) {
    this.path = path;
    this.signal = signal;
    this.place = el("div", { class: "stack" });
    this.plots = new Map();
  }

  async refresh(job) {
    let told;
    try {
      told = await get(`${this.path}/history`, { signal: this.signal });
    } catch (error) {
      if (!(error instanceof Problem && error.status === 404)) throw error;
      put(this.place, card("History", el("p", { class: "muted" }, "This service keeps no history of jobs.")));
      return;
    }
    const untilS = ["succeeded", "failed", "cancelled"].includes(job.state) ? job.state_since_s : Date.now() / 1000;
    this.#allocation(told.allocations, untilS);
    this.#samples(told.samples);
    const cards = [...this.plots.values()].map((plot) => plot.card);
    if (!cards.length) cards.push(card("History", empty("Nothing to draw yet", "Its GPUs, loss and throughput over time come here once it has run.")));
    if (cards.some((each) => each.parentNode !== this.place)) put(this.place, cards);
  }

  #allocation(steps, untilS) {
    if (!steps.length) return;
    const last = steps.at(-1);
    const rows = [...steps, { ...last, at_s: Math.max(untilS, last.at_s) }];
    const series = [
      { label: "Held", colour: "training", stepped: true, fill: "accent-soft" },
      { label: "of these lent", colour: "lent", stepped: true, dash: [5, 3] },
    ];
    this.#plot("Allocation", { label: "GPUs held over time", unit: "GPUs", series, height: 170 }).update([
      rows.map((row) => row.at_s),
      rows.map((row) => row.gpus),
      rows.map((row) => row.lent_gpus),
    ]);
  }

  #samples(samples) {
    const known = (name) => samples.some((sample) => sample[name] !== null);
    const column = (name) => [samples.map((sample) => sample.at_s), samples.map((sample) => sample[name])];
    if (known("loss")) this.#plot("Loss", { label: "Loss over time", series: [{ label: "Loss", colour: "recalled" }], height: 170 }).update(column("loss"));
    if (known("samples_per_s")) {
      const series = [{ label: "Throughput", colour: "inference" }];
      this.#plot("Throughput", { label: "Throughput over time", unit: "samples/s", series, height: 170 }).update(column("samples_per_s"));
    }
  }

  #plot(title, spec) {
    if (!this.plots.has(title)) {
      const body = el("div", {});
      this.plots.set(title, { card: card(title, body), drawn: chart(body, spec, this.signal) });
    }
    return this.plots.get(title).drawn;
  }
}

/** Events of a job, newest first, as steps of a line. */
export function eventSteps(events) {
  if (!events.length) return empty("Nothing has happened yet");
  const shown = events.slice(-STEPS_MAX).reverse();
  const steps = shown.map((event) => {
    const state = /\b(submitted|planning|queued|starting|running|resizing|preempted|suspended|succeeded|failed|cancelled)\b/.exec(event.code === "JobState" ? event.message.split("->").at(-1) : "");
    const when = el("time", { class: "muted", datetime: new Date(1000 * event.at_s).toISOString() }, time(event.at_s));
    return el("li", { data: { state: state?.[1] || "idle" } }, when, state ? badge(state[1]) : el("strong", {}, words(event.code)), el("span", {}, arrows(event.message)));
  });
  const more = events.length - shown.length;
  return el("div", { class: "stack" }, el("ol", { class: "steps" }, steps), more > 0 ? el("p", { class: "small muted" }, `and ${plural(more, "event")} before`) : null);
}
