// The fleet at a past time: nodes, jobs and events as they were, under a banner.

import { get } from "./api.js";
import { card, el, empty, put, table } from "./dom.js";
import { problemNote } from "./dialogs.js";
import { FleetGrid } from "./fleet_grid.js";
import { arrows, count, duration, gpus, plural, range, time, timeToMinute } from "./format.js";
import { age, when } from "./times.js";

const ROWS_MAX = 12;
const OLD_S = 7200; // while a controller leads, each hour has a checkpoint
const WAIT_MS = 120; // while the slider moves, requests wait until it rests

/** Shows the fleet at a past time in `place`. `leave` goes back to the present. */
export class PastFleet {
  /** @param {{signal: AbortSignal, leave: () => void}} options */
  constructor({ signal, leave }) {
    this.signal = signal;
    this.text = el("span", {});
    const back = el("button", { type: "button", on: { click: leave } }, "Back to now");
    this.banner = el("div", { class: "note past-banner" }, el("p", { role: "status" }, this.text), back);
    this.body = el("div", { class: "stack" });
    this.place = el("div", { class: "stack" }, this.banner, this.body);
    this.place.hidden = true;
    this.timer = 0;
    this.atS = null;
  }

  /** Shows a time once the slider rests; null hides the view. */
  show(atS) {
    clearTimeout(this.timer);
    this.atS = atS;
    this.place.hidden = atS === null;
    if (atS === null) return;
    this.text.textContent = `Showing ${timeToMinute(atS)}.`;
    this.timer = setTimeout(() => this.#load(atS), WAIT_MS);
  }

  async #load(atS) {
    try {
      const past = await get("/v1/history/snapshot", { query: { at_s: atS }, signal: this.signal });
      if (atS === this.atS) this.#draw(past);
    } catch (error) {
      if (this.signal.aborted || atS !== this.atS) return;
      put(this.body, error.status === 404 ? noCheckpoint() : problemNote(error));
    }
  }

  #draw(past) {
    const behindS = past.at_s - past.as_of_s;
    const basis = `The last change of nodes and jobs was at ${time(past.as_of_s)}`;
    const old = behindS > OLD_S ? `, ${duration(behindS)} before: nothing was recorded in between` : "";
    this.text.textContent = `Showing ${timeToMinute(past.at_s)}. ${basis}${old}.`;
    this.banner.classList.toggle("warn", behindS > OLD_S);
    put(this.body, el("div", { class: "columns" },
      el("div", { class: "stack" }, this.#pools(past), jobsCard(past)),
      el("div", { class: "stack" }, pendingCard(past), eventsCard(past))));
  }

  #pools(past) {
    const names = [...new Set(past.nodes.map((node) => node.pool))];
    return names.map((name) => {
      const nodes = past.nodes.filter((node) => node.pool === name);
      const grid = new FleetGrid(name, () => {});
      grid.update(nodes, []);
      const size = `${plural(nodes.length, "node")}, ${gpus(nodes.reduce((sum, node) => sum + node.gpus, 0))}`;
      const note = el("span", { class: "small muted" }, size);
      return card([`Pool ${name} at ${timeToMinute(past.at_s)}`, note], grid.parts);
    });
  }
}

function noCheckpoint() {
  const text = "The service records each change of the fleet, and keeps these records for 30 days.";
  return empty("The fleet was not recorded then", text);
}

function jobLink(job) {
  return el("a", { href: `#/jobs/${job.id}`, title: job.id }, job.name);
}

function jobsCard(past) {
  const largest = [...past.jobs].sort((a, b) => b.gpus - a.gpus).slice(0, ROWS_MAX);
  if (!largest.length) return card("Jobs on GPUs", empty("No job held GPUs"));
  const rows = largest.map((job) => [jobLink(job), job.queue, job.state, count(job.gpus), count(job.nodes)]);
  const columns = [["Job"], ["Queue"], ["State"], ["GPUs", true], ["Nodes", true]];
  return card([`${plural(past.jobs.length, "job")} on GPUs`], table("Jobs that held GPUs", columns, rows),
    rest(past.jobs.length));
}

function pendingCard(past) {
  if (!past.pending_jobs) return card("Pending jobs", empty("No pending jobs"));
  const rows = past.pending.slice(0, ROWS_MAX).map((job) => el("li", {},
    el("p", { class: "row" }, jobLink(job), el("span", { class: "small muted" }, job.queue)),
    el("p", { class: "small muted" }, `${range(job.min_gpus, job.max_gpus)} GPUs, for `,
      duration(Math.max(0, Math.round(past.at_s - job.submitted_at_s))))));
  const list = el("ol", { class: "waiting", "aria-label": "Longest pending jobs then" }, rows);
  const asked = el("p", { class: "small muted" }, `at least ${gpus(past.pending_gpus)} requested`);
  return card(plural(past.pending_jobs, "pending job"), asked, list, rest(past.pending_jobs));
}

function rest(total) {
  return total > ROWS_MAX && el("p", { class: "small muted" }, `and ${plural(total - ROWS_MAX, "more job")}`);
}

function eventsCard(past) {
  if (!past.events.length) return card("Events before", empty("No events in the half hour before"));
  const items = past.events.slice(0, ROWS_MAX).map((event) => el("li", {}, when(event.at_s), el("p", {},
    arrows(event.message))));
  return card("Events before", el("ol", { class: "feed" }, items));
}
