// The capacity timeline: use of each pool over time, the forecast of demand, and a slider that shows a past time.

import { get } from "./api.js";
import {
  binAt, hashOf, markersOf, RANGES, rangeFor, rangeOf, sliderStepS, timelineColumns, totalsOf, usesOf,
} from "./capacity_data.js";
import { card, el, empty, put, redraw, say } from "./dom.js";
import { duration, figure, gpuTime, percent, plural, timeToMinute } from "./format.js";
import { chart } from "./plotting.js";
import { spansOf } from "./problem_spans.js";
import { colour } from "./theme.js";

const HEIGHT_PX = { inference: 240, training: 140 };
const REFRESH_S = [20, 300]; // shortest and longest pause between two requests
const MARKER_PX = 5;
const PROBLEM_PX = 4; // height of the marks of problems, and their least width
const PROBLEM_COLOURS = { critical: "recalled", warning: "lent", notice: "accent" };

/**
 * The timeline of all pools. Calls `shown(atS)` when the user picks a past time; null is the present. With `pool`, the
 * timeline of this pool alone, without a slider: a picked time opens the overview.
 * @typedef {{signal: AbortSignal, query?: URLSearchParams, shown?: (atS: number | null) => void, pool?: string}}
 * TimelineOptions
 */
export class CapacityTimeline {
  /** @param {TimelineOptions} options */
  constructor({ signal, query = new URLSearchParams(), shown = () => {}, pool = "" }) {
    this.signal = signal;
    this.shown = shown;
    this.pool = pool;
    this.range = rangeOf(query.get("range"));
    this.atS = null;
    this.history = null;
    this.problems = null;
    this.charts = new Map();
    this.fetchedAtS = -Infinity;
    this.pools = el("div", { class: "stack" });
    this.slider = this.#slider();
    this.output = el("output", { class: "small", for: "timeline-slider" });
    const slider = el("div", { class: "timeline-slider" },
      el("label", { for: "timeline-slider", class: "small" }, "Time shown"), this.slider, this.output);
    this.controls = el("div", { class: "timeline-controls" }, this.#ranges(), !pool && slider);
    const parts = [this.controls, this.pools];
    this.place = el("section", { class: "stack capacity", "aria-label": "Capacity over time" }, parts);
  }

  /** Loads the history if it is due, and redraws the charts. */
  async refresh(nowS) {
    const pauseS = Math.min(REFRESH_S[1], Math.max(REFRESH_S[0], (this.history?.step_s ?? 0) / 3));
    if (nowS - this.fetchedAtS < pauseS && nowS >= this.fetchedAtS) return;
    const { range } = this;
    const fromS = Math.max(0, nowS - range.seconds);
    const [history, problems] = await Promise.all([
      get("/v1/history", { query: { pool: this.pool, from_s: fromS }, signal: this.signal }),
      get("/v1/problems", { query: { resolved_since_s: fromS }, signal: this.signal }),
    ]);
    if (range !== this.range) return; // another range was chosen meanwhile
    this.history = history;
    this.problems = problems;
    this.fetchedAtS = nowS;
    this.#draw();
  }

  /** Widens the range until it covers a time. */
  cover(atS, nowS) {
    this.range = rangeFor(this.range, atS, nowS);
    for (const box of this.controls.querySelectorAll("input[type=radio]")) {
      if (box instanceof HTMLInputElement) box.checked = box.value === this.range.key;
    }
  }

  /** Shows a past time; null is the present. */
  pick(atS) {
    if (this.pool) {
      location.hash = hashOf(this.range, atS);
      return;
    }
    this.atS = atS;
    this.#updateAddress();
    this.#drawTime();
    this.shown(atS);
  }

  #ranges() {
    const choose = async (event) => {
      this.range = rangeOf(event.target.value);
      this.fetchedAtS = -Infinity;
      this.#updateAddress();
      await this.refresh(this.history?.now_s ?? Date.now() / 1000).catch(() => {}); // the page reports the next failure
    };
    const options = RANGES.map((range) => {
      const box = { type: "radio", name: "timeline-range", value: range.key, checked: range === this.range };
      return el("label", {}, el("input", { ...box, on: { change: choose } }), el("span", {}, range.name));
    });
    return el("fieldset", { class: "segments" }, el("legend", { class: "unseen" }, "Time range"), options);
  }

  #slider() {
    const slide = (event) => {
      const slider = event.target;
      this.pick(slider.value === slider.max ? null : Number(slider.value));
    };
    const range = { type: "range", id: "timeline-slider", min: 0, max: 1, value: 1, step: 1 };
    return el("input", { ...range, on: { input: slide } });
  }

  #updateAddress() {
    if (!this.pool) history.replaceState(history.state, "", hashOf(this.range, this.atS));
  }

  #draw() {
    const { pools } = this.history;
    const key = pools.map(partsOf).join("\n");
    if (key !== this.key) {
      this.key = key;
      this.charts = new Map(pools.map((pool) => [pool.name, new PoolTimeline(pool, this)]));
      put(this.pools, [...this.charts.values()].map((each) => each.place));
    }
    for (const pool of pools) this.charts.get(pool.name).update(this.history, pool);
    this.#drawTime();
  }

  #drawTime() {
    if (!this.history) return;
    const { now_s: nowS } = this.history;
    const stepS = sliderStepS(this.range.seconds);
    const fromS = Math.min(nowS - this.range.seconds, this.atS ?? nowS);
    const atS = this.atS ?? nowS;
    Object.assign(this.slider, { min: String(Math.ceil(fromS)), max: String(Math.floor(nowS)), step: String(stepS) });
    // Positions of a range input are multiples of its step from its minimum; the present must be one.
    this.slider.min = String(Math.floor(nowS) - stepS * Math.ceil((nowS - fromS) / stepS));
    this.slider.value = String(Math.floor(atS));
    const text = this.atS === null ? "now" : timeToMinute(atS);
    this.slider.setAttribute("aria-valuetext", text);
    say(this.output, text);
    for (const each of this.charts.values()) each.redraw();
  }
}

/** The chart of one pool. */
class PoolTimeline {
  constructor(pool, timeline) {
    this.timeline = timeline;
    this.name = pool.name;
    this.body = el("div", {});
    this.note = el("span", { class: "small muted" });
    this.legend = el("ul", { class: "legend timeline-key", "aria-label": "Marks" });
    const kind = pool.name === pool.kind ? "" : ` (${pool.kind})`;
    this.place = card([`Capacity of ${pool.name}${kind}`, this.note], this.body, this.legend);
    this.isEmpty = null;
    this.plot = null;
  }

  update(history, pool) {
    const isEmpty = !pool.capacity.some((value) => value > 0);
    if (isEmpty) {
      if (this.isEmpty !== true) put(this.body, empty("Nothing recorded in this time"));
      Object.assign(this, { isEmpty, plot: null });
      return;
    }
    this.history = history;
    this.pool = pool;
    this.markers = markersOf(history, pool);
    this.spans = spansOf(this.timeline.problems, pool.name, history.now_s);
    if (!this.plot) this.plot = chart(this.body, this.#spec(pool), this.timeline.signal);
    this.isEmpty = false;
    const { range } = this.timeline;
    const { values, drawn, now } = timelineColumns(history, pool, range.aheadS);
    const hasFan = history.pools.some((each) => each.fan); // all charts cover the same time
    this.now = now;
    this.plot.update(values, now, [history.from_s, history.now_s + (hasFan ? range.aheadS : 0)], drawn);
    say(this.note, sentence(history, pool));
    redraw(this.legend, `${this.markers.length > 0} ${this.spans.length}`, () => this.#marks(pool));
  }

  /** Draws the marks again, after another time was picked, and shows its values. */
  redraw() {
    const { atS } = this.timeline;
    if (this.plot) this.plot.redraw(atS === null ? this.now : binAt(this.history, atS));
  }

  #spec(pool) {
    const uses = usesOf(pool);
    const [lowest] = uses; // the others are filled as bands down to the one below
    const stack = uses.map((use) => ({
      label: use.label, colour: use.colour, swatch: use.colour, width: 1, fill: use === lowest ? use.colour : null,
    }));
    const quantiles = pool.fan?.quantiles ?? [];
    const first = uses.length + 3; // after x, capacity and demand
    const fan = quantiles.map((level, at) => ({
      label: `Forecast ${percent(level)}`,
      colour: "inference",
      width: at ? 1 : 1.5,
      dash: at ? [2, 3] : [6, 3],
      quiet: true,
    }));
    return {
      label: `Use of the GPUs of pool ${pool.name}`,
      unit: "GPUs",
      height: HEIGHT_PX[pool.kind],
      headroom: pool.kind === "inference" ? 1.28 : 1.08, // room for the marks
      gaps: true,
      together: "capacity",
      bands: [
        ...uses.slice(1).map((use, at) => [at + 2, at + 1, use.colour]),
        ...quantiles.slice(1).map((_, at) => [first + at + 1, first + at, at < 2 ? "band-1" : "band-2"]),
      ],
      series: [
        ...stack,
        { label: "Capacity", colour: "text", dash: [6, 4], width: 1.5, quiet: true },
        { label: "Demand", colour: "use-demand", swatch: "use-demand", width: 2, quiet: pool.kind === "training" },
        ...fan,
        { label: "Recalled", unit: "nodes", apart: true, quiet: pool.kind === "training" },
        { label: "Returned", unit: "nodes", apart: true, quiet: pool.kind === "training" },
      ],
      drawn: (plot) => this.#drawMarks(plot),
      picked: (atS) => atS < this.history.now_s && this.timeline.pick(Math.max(this.history.from_s, atS)),
    };
  }

  #drawMarks(plot) {
    if (!this.history) return;
    const { ctx, bbox } = plot;
    const ratio = window.devicePixelRatio || 1;
    const xOf = (atS) => plot.valToPos(atS, "x", true);
    const mark = (each, topPx, isDown) => {
      triangle(ctx, [xOf(each.atS), bbox.top + topPx * ratio, ratio], each.late ? "recalled" : "text", isDown);
    };
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
    ctx.clip();
    for (const span of this.spans) {
      const left = xOf(span.beginS);
      ctx.fillStyle = colour(PROBLEM_COLOURS[span.severity]);
      const size = [Math.max(PROBLEM_PX * ratio, xOf(span.endS) - left), PROBLEM_PX * ratio];
      ctx.fillRect(left, bbox.top + bbox.height - size[1], size[0], size[1]);
    }
    for (const each of this.markers) {
      if (each.recalls) mark(each, 2, true);
      if (each.returns) mark(each, 16, false);
    }
    rule(ctx, bbox, [xOf(this.history.now_s), ratio], "line-strong");
    if (this.timeline.atS !== null) rule(ctx, bbox, [xOf(this.timeline.atS), 2 * ratio], "accent");
    ctx.restore();
  }

  #marks(pool) {
    const bar = el("span", { class: "mark problem-mark", "aria-hidden": "true" });
    const problems = this.spans.length > 0 && el("li", {}, bar,
      el("a", { href: "#/alerts" }, plural(this.spans.length, "problem")));
    if (pool.kind === "training") return problems;
    const entry = (mark, text) => el("li", {}, el("span", { class: "mark", "aria-hidden": "true" }, mark), text);
    const swatch = (kind) => el("span", { class: `mark ${kind}`, "aria-hidden": "true" });
    const fan = pool.fan && el("li", {}, swatch("fan"), "Forecast, 50% to 99.9%");
    const marks = this.markers.length > 0 && [entry("▼", "Recall"), entry("▲", "Return (red: after the deadline)")];
    return [el("li", {}, swatch("capacity-line"), "Capacity"), fan, marks, problems];
  }
}

/** Returns what the series of a pool's chart depend on. */
function partsOf(pool) {
  return `${pool.name} ${usesOf(pool).map((use) => use.key)} ${pool.fan?.quantiles}`;
}

function triangle(ctx, [x, y, ratio], name, pointsDown) {
  const size = MARKER_PX * ratio;
  ctx.fillStyle = colour(name);
  ctx.beginPath();
  ctx.moveTo(x - size, pointsDown ? y : y + 2 * size);
  ctx.lineTo(x + size, pointsDown ? y : y + 2 * size);
  ctx.lineTo(x, pointsDown ? y + 2 * size : y);
  ctx.closePath();
  ctx.fill();
}

function rule(ctx, bbox, [x, width], name) {
  ctx.strokeStyle = colour(name);
  ctx.lineWidth = width;
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
}

/** Sums the shown time up in one line. */
function sentence(history, pool) {
  const totals = totalsOf(history, pool);
  const share = totals.capacity ? percent(totals.used / totals.capacity) : "–";
  if (pool.kind === "training") return `${gpuTime(3600 * totals.used)} used, ${share} of capacity`;
  const lent = totals.lentUsed + totals.lentIdle;
  if (!lent && !totals.recalls) return "nothing lent in this time";
  const idle = totals.lentIdle > 0.05 ? `, ${figure(totals.lentIdle)} idle` : "";
  const late = totals.late ? `, ${plural(totals.late, "return")} late` : "";
  const short = totals.shortS ? `, inference short for ${duration(totals.shortS)}` : "";
  return `${gpuTime(3600 * lent)} lent${idle}; ${plural(totals.recalls, "recall")}${late}${short}`;
}
