// Gantt page: nodes by time. Each box is a job on GPUs of a node; marks show resizes and recalls, bands show loans.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { card, el, empty, put, redraw, table } from "../dom.js";
import { count, figure, plural, timeToMinute } from "../format.js";
import { drawLane, endWords, jobSwatch, legend, patterns } from "../gantt_drawing.js";
import { LANES_PER_PAGE, LENGTHS, addressOf, jobsOf, lanesOf, pageOf, pan, readView, timesOf, zoom }
  from "../gantt_layout.js";
import { keepUp } from "../live.js";
import { when } from "../times.js";

const SPANS_PER_REQUEST = 1000;
const SPANS_MAX = 10_000;
const LOANS_MAX = 5000;
const ROWS_MAX = 200;
const JOBS_MAX = 30;
const HOUR_S = 3600;

export const title = () => "Gantt";

export async function show(root, { query, signal }) {
  const page = new GanttPage(root, readView(query), signal);
  const wants = (event) => /^(Job|Loan|Node)/.test(event.code);
  const failed = (error) => page.failed(error);
  page.again = keepUp(() => page.refresh(), { signal, everyS: 15, wants, failed });
}

class GanttPage {
  again = () => {}; // set once the page refreshes itself
  nodes = new Map();
  pools = [];
  spans = [];
  loans = [];
  isCut = false;
  generation = undefined;
  nowS = Date.now() / 1000;
  widthPx = 0;

  constructor(root, view, signal) {
    this.view = view;
    this.signal = signal;
    this.places = { form: el("div"), problem: el("div"), chart: el("div", { class: "stack" }), jobs: el("div") };
    const heading = el("div", { class: "head" }, el("h1", { class: "grow" }, "Gantt"), this.#buttons());
    put(root, heading, el("div", { class: "stack" }, patterns(), ...Object.values(this.places)));
    this.#drawForm();
    addEventListener("resize", () => this.#draw(), { signal });
  }

  async refresh() {
    const { signal, view } = this;
    const fleet = await get("/v1/overview", { query: { generation: this.generation }, signal });
    this.generation = fleet.generation;
    if (fleet.complete) this.nodes.clear();
    for (const node of fleet.nodes) this.nodes.set(node.name, node);
    for (const name of fleet.gone) this.nodes.delete(name);
    this.pools = fleet.pools.map((pool) => pool.name);
    this.nowS = fleet.now_s;
    const [fromS, toS] = timesOf(view, this.nowS);
    const [spans, loans] = await Promise.all([this.#loadSpans(fromS, toS), this.#loadLoans(fromS, toS)]);
    if (view !== this.view) return this.again(); // another view was chosen meanwhile
    [this.spans, this.isCut] = spans;
    this.loans = loans;
    this.#offerPools();
    this.#draw();
  }

  failed(error) {
    put(this.places.problem, error && problemNote(error));
  }

  async #loadSpans(fromS, toS) {
    const { pool, queue, job } = this.view;
    const filters = { from: fromS.toFixed(3), to: toS.toFixed(3), pool, queue, job, limit: SPANS_PER_REQUEST };
    return loadAll("/v1/allocations", filters, SPANS_MAX, this.signal);
  }

  async #loadLoans(fromS, toS) {
    const filters = { since_s: fromS, until_s: toS, pool: this.view.pool, limit: SPANS_PER_REQUEST };
    return (await loadAll("/v1/loans", filters, LOANS_MAX, this.signal))[0];
  }

  /** Shows another view: what is loaded at once, and the rest when it arrives. */
  #choose(view) {
    this.view = view;
    history.replaceState(null, "", addressOf(view));
    this.#drawForm();
    this.#draw();
    this.again();
  }

  #move(change) {
    this.#choose({ ...change(this.view, this.nowS), page: this.view.page });
  }

  #buttons() {
    const button = (name, change, key) => {
      const act = () => this.#move(change);
      const props = { type: "button", "aria-keyshortcuts": key, title: `${name} (${key})` };
      return el("button", { ...props, on: { click: act } }, name);
    };
    return el(
      "div",
      { class: "row", role: "group", "aria-label": "Visible time" },
      button("Earlier", earlier, "ArrowLeft"),
      button("Later", later, "ArrowRight"),
      button("Zoom in", zoomIn, "+"),
      button("Zoom out", zoomOut, "-"),
      button("Now", toNow, "0"),
    );
  }

  #drawForm() {
    const { view } = this;
    const choice = (id, name, choices) => {
      return el("div", {}, el("label", { for: id }, name), el("select", { id, name: id }, choices));
    };
    const text = (id, name) => {
      const input = el("input", { id, name: id, value: view[id], placeholder: "any", autocomplete: "off" });
      return el("div", {}, el("label", { for: id }, name), input);
    };
    const usual = LENGTHS.some(([, value]) => value === view.lengthS);
    const lengths = usual ? LENGTHS : [...LENGTHS, ["Zoomed", Math.round(view.lengthS)]];
    const apply = (event) => {
      event.preventDefault();
      const given = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value)]));
      const lengthS = Number(given.last) || view.lengthS;
      this.#choose({ ...this.view, lengthS, pool: given.pool, queue: given.queue, job: given.job, page: 1 });
    };
    const form = el(
      "form",
      { class: "filters", role: "search", "aria-label": "Filter allocations", on: { submit: apply } },
      choice("last", "Length", options(lengths, Math.round(view.lengthS))),
      choice("pool", "Pool", []),
      text("queue", "Queue"),
      text("job", "Job id"),
      el("button", { type: "submit" }, "Filter"),
    );
    for (const select of form.querySelectorAll("select")) select.addEventListener("change", apply);
    redraw(this.places.form, JSON.stringify(view), () => form);
    this.#offerPools();
  }

  /** Fills the list of pools in place, so that what was typed meanwhile stays. */
  #offerPools() {
    const { pools, view } = this;
    const names = pools.includes(view.pool) || !view.pool ? pools : [...pools, view.pool];
    const choice = this.places.form.querySelector("select[name=pool]");
    const offered = [["All pools", ""], ...names.map((name) => [name, name])];
    redraw(choice, JSON.stringify(offered), () => options(offered, view.pool));
  }

  #draw() {
    if (!this.generation) return;
    const shown = { view: this.view, nowS: this.nowS };
    const lanes = lanesOf([...this.nodes.values()], this.spans, this.loans, shown);
    const { lanes: drawn, page, pages } = pageOf(lanes, this.view.page);
    if (!lanes.length) {
      put(this.places.chart, card("Nodes", this.#nothing()));
      put(this.places.jobs);
      return;
    }
    const used = lanes.filter((lane) => lane.boxes.length).length;
    const about = el("span", { class: "small muted" }, `${plural(lanes.length, "node")}, ${count(used)} with jobs`);
    const chart = this.#chart(drawn);
    put(
      this.places.chart,
      this.isCut && el("p", { class: "note warn" }, cutNote()),
      card(["Nodes", about], legend(), chart, pages > 1 && this.#pager(page, pages), spanTable(drawn)),
    );
    put(this.places.jobs, jobCard(jobsOf(this.spans, shown)));
  }

  #nothing() {
    if (this.view.queue || this.view.job) {
      return empty("No allocations in this time", "Choose another time, or clear the filters above.");
    }
    const command = el("pre", {}, "ebbtide demo");
    return empty("No nodes", "Add a node to see which jobs run on it, or try a simulated fleet:", command);
  }

  #chart(lanes) {
    const [fromS, toS] = timesOf(this.view, this.nowS);
    this.widthPx = Math.max(160, (this.places.chart.clientWidth || 900) - 190);
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => {
      const isNow = part === 1 && this.view.endS === null;
      return el("span", {}, isNow ? "now" : timeToMinute(fromS + part * (toS - fromS)));
    });
    const axis = el("div", { class: "gantt-lane gantt-times" }, el("span"), el("div", { class: "axis" }, ticks));
    const rows = [axis, ...lanes.map((lane) => drawLane(lane, this.widthPx))];
    const label = "Nodes by time. Arrow keys move the visible time, plus and minus zoom, 0 returns to now. "
      + "The tables below have the same data.";
    const on = { keydown: (event) => this.#pressed(event) };
    return el("div", { class: "gantt", tabindex: "0", role: "group", "aria-label": label, on }, rows);
  }

  #pressed(event) {
    const change = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
    if (!change) return;
    event.preventDefault();
    this.#move(change);
  }

  #pager(page, pages) {
    const turn = (to) => () => {
      this.#choose({ ...this.view, page: to });
      this.places.chart.scrollIntoView({ block: "start" });
    };
    const button = (name, to) => {
      return el("button", { type: "button", disabled: to < 1 || to > pages, on: { click: turn(to) } }, name);
    };
    const at = el("span", { class: "muted small" }, `Page ${page} of ${pages}, ${LANES_PER_PAGE} nodes each`);
    const props = { class: "row", "aria-label": "Pages of nodes" };
    return el("nav", props, button("Previous nodes", page - 1), at, button("Next nodes", page + 1));
  }
}

/** The options of a list of choices, from pairs of a name and a value. */
function options(pairs, chosen) {
  return pairs.map(([name, value]) => el("option", { value, selected: value === chosen }, name));
}

const earlier = (view, nowS) => pan(view, -0.5, nowS);
const later = (view, nowS) => pan(view, 0.5, nowS);
const zoomIn = (view, nowS) => zoom(view, 0.5, nowS);
const zoomOut = (view, nowS) => zoom(view, 2, nowS);
const toNow = (view) => ({ ...view, endS: null });
const KEYS = {
  ArrowLeft: earlier, ArrowRight: later, "+": zoomIn, "=": zoomIn, "-": zoomOut, 0: toNow,
};

/**
 * Returns up to about `most` items of a list, and whether there are more.
 * @returns {Promise<[any[], boolean]>}
 */
async function loadAll(path, filters, most, signal) {
  const items = [];
  let cursor = "";
  do {
    const page = await get(path, { query: { ...filters, cursor }, signal });
    items.push(...page.items);
    cursor = page.next;
  } while (cursor && items.length < most);
  return [items, Boolean(cursor)];
}

function cutNote() {
  const shown = `Only the newest ${count(SPANS_MAX)} allocations of this time are shown.`;
  return `${shown} Zoom in, or filter by pool, queue or job.`;
}

function jobCard(jobs) {
  const hours = (gpuS) => figure(gpuS / HOUR_S);
  const rows = jobs.slice(0, JOBS_MAX).map((job) => {
    const isHidden = job.name === null;
    const link = el("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, job.name);
    return [
      el("span", { class: "row" }, jobSwatch(job.id, isHidden), isHidden ? "Jobs of other queues" : link),
      job.queue ?? "–",
      job.owner || "–",
      count(job.nodes.size),
      hours(job.gpuS),
      hours(job.lentGpuS),
      count(job.resizedAt.size),
      count(job.recalledAt.size),
    ];
  });
  if (!rows.length) return null;
  const numbers = ["Nodes", "GPU-hours", "On loan", "Resizes", "Recalls"].map((name) => [name, true]);
  const columns = [["Job"], ["Queue"], ["Owner"], ...numbers];
  return card("Jobs in this time", table("Jobs in this time", columns, rows), others(jobs.length - JOBS_MAX, "job"));
}

/** The drawn allocations as a table, which is filled when it is opened. */
function spanTable(lanes) {
  const place = el("div");
  const details = el("details", {}, el("summary", {}, "Allocations as a table"), place);
  details.addEventListener("toggle", () => details.open && put(place, spanRows(lanes)));
  return details;
}

function spanRows(lanes) {
  const spans = [...new Set(lanes.flatMap((lane) => lane.boxes.map((box) => box.span)))];
  const rows = spans.slice(0, ROWS_MAX).map((span) => [
    span.name === null ? span.job_id : el("a", { href: `#/jobs/${encodeURIComponent(span.job_id)}` }, span.name),
    span.node,
    span.gpus.join(", "),
    span.is_lent ? "on loan" : "own",
    when(span.begin_s),
    span.end_s === null ? "–" : when(span.end_s),
    endWords(span.end),
  ]);
  const columns = [["Job"], ["Node"], ["GPUs"], ["Node is"], ["From", true], ["To", true], ["End"]];
  return [table("Allocations", columns, rows), others(spans.length - ROWS_MAX, "allocation")];
}

/** Says how many rows are left out. */
function others(left, noun) {
  return left > 0 && el("p", { class: "small muted" }, `and ${plural(left, `more ${noun}`)}`);
}
