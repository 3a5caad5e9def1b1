// Savings page: GPU time lent, recovered, lost and idle while jobs waited, with amounts, and a simulated comparison.

import { actionButton } from "../actions.js";
import { get, raw, withSession } from "../api.js";
import { downloadBlob } from "../csv_text.js";
import { problemNote } from "../dialogs.js";
import { card, el, empty, figureOf, put, redraw, table } from "../dom.js";
import { count, duration, figure, money, percent, plural } from "../format.js";
import { keepUp } from "../live.js";
import { may, whoAmI } from "../permissions.js";
import { contextOf, drawBars, pictureOf } from "../savings_chart.js";
import {
  DIMENSIONS,
  PARTS,
  PERIODS,
  addressOf,
  barsOf,
  hoursOf,
  readChoice,
  shortenings,
  toHours,
} from "../savings_figures.js";
import { onTheme } from "../theme.js";
import { when } from "../times.js";
import { DailyComparisons } from "./savings_days.js";

const DAY_S = 86400;
const HOUR_S = 3600;
const CHART_PX = 260;
const DAYS_EVERY_MS = 300_000;
const UNNAMED = { model: "not stated" };
const ROWS_MAX = 200;
const VARIANTS = {
  today: "As today",
  no_lending: "Without lending",
  no_elasticity: "Without elasticity",
};
const dates = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric", timeZone: "UTC" });

export const title = () => "Savings";

export async function show(root, { query, signal }) {
  const page = new SavingsPage(root, readChoice(query), signal);
  const failed = (error) => page.failed(error);
  page.again = keepUp(() => page.refresh(), { signal, everyS: 20, wants: () => false, failed });
}

class SavingsPage {
  again = () => {}; // set once the page refreshes itself
  bars = [];
  canvas = null;
  daysRead = null;

  constructor(root, choice, signal) {
    this.choice = choice;
    this.signal = signal;
    const names = ["problem", "figures", "chart", "rows", "comparison", "days"];
    this.places = Object.fromEntries(names.map((name) => [name, el("div")]));
    const heading = el("div", { class: "head" }, el("h1", { class: "grow" }, "Savings"), this.#choices());
    put(root, heading, el("div", { class: "stack" }, names.map((name) => this.places[name])));
    this.days = new DailyComparisons(this.places.days, signal, (error) => this.failed(error));
    addEventListener("resize", () => this.#drawCanvas(), { signal });
    onTheme(() => this.#drawCanvas(), signal);
  }

  async refresh() {
    const { signal, choice } = this;
    const from = String(Math.floor(Date.now() / 1000) - choice.days * DAY_S);
    const ask = (by) => get("/v1/savings", { query: { from, by }, signal });
    const [byDay, byChoice, comparison, days, who] = await Promise.all([
      ask("day"),
      choice.by === "day" ? null : ask(choice.by),
      readable(get("/v1/savings/comparison", { signal })),
      this.#loadDays(from),
      whoAmI(),
    ]);
    if (choice !== this.choice) return this.again();
    this.report = byDay;
    put(this.places.figures, figures(byDay), notes(byDay));
    this.#drawChart(byDay);
    put(this.places.rows, rowCard(byChoice ?? byDay, () => this.#saveTable()));
    this.#drawComparison(comparison, who);
    this.days.update(days, from);
    return undefined;
  }

  /** Days change once a day, so they are read seldom. */
  async #loadDays(from) {
    const { days } = this.choice;
    const isFresh = this.daysRead?.days === days && performance.now() - this.daysRead.atMs < DAYS_EVERY_MS;
    if (isFresh) return this.daysRead.view;
    const view = await readable(get("/v1/savings/comparison/days", { query: { from }, signal: this.signal }));
    this.daysRead = { days, atMs: performance.now(), view };
    return view;
  }

  failed(error) {
    put(this.places.problem, error && problemNote(error));
  }

  #choices() {
    const select = (id, name, options, chosen) => {
      const choices = options.map(([label, value]) => el("option", { value, selected: value === chosen }, label));
      const choose = ({ target }) => this.#choose({ [id]: id === "days" ? Number(target.value) : target.value });
      return el("label", { class: "row small" }, name, el("select", { id, on: { change: choose } }, choices));
    };
    const { days, by } = this.choice;
    const selects = [select("days", "Last", PERIODS, days), select("by", "By", DIMENSIONS, by)];
    return el("div", { class: "row savings-choices" }, selects);
  }

  #choose(change) {
    this.choice = { ...this.choice, ...change };
    history.replaceState(null, "", addressOf(this.choice));
    this.again();
  }

  #drawChart(report) {
    this.bars = barsOf(report.items, report.from_s, report.to_s);
    if (!this.canvas) {
      this.canvas = el("canvas", { class: "savings-chart", role: "img", "aria-label": CHART_LABEL });
      this.values = el("div");
      const details = el("details", {}, el("summary", {}, "Values as a table"), this.values);
      const save = el("button", { type: "button", on: { click: () => this.#savePicture() } }, "Save as PNG");
      const drawing = el("div", {}, this.canvas);
      put(this.places.chart, card(["GPU-hours by day (UTC)", save], legend(), drawing, details));
    }
    const valuesOf = (bar) => [...bar.parts, bar.idleWaiting].map(figure);
    const rows = this.bars.map((bar) => [dates.format(1000 * bar.dayS), ...valuesOf(bar)]);
    const names = [...PARTS.map(([name]) => name), "Idle while jobs waited"];
    const columns = [["Day"], ...names.map((name) => [name, true])];
    put(this.values, table("GPU-hours by day", columns, rows.reverse()));
    this.#drawCanvas();
  }

  #drawCanvas() {
    if (!this.canvas?.isConnected) return;
    const width = Math.max(220, Math.floor(this.canvas.parentElement.clientWidth));
    drawBars(contextOf(this.canvas, width, CHART_PX), this.bars, { x: 0, y: 0, width, height: CHART_PX });
  }

  async #savePicture() {
    const { from_s: fromS, to_s: toS } = this.report;
    const name = `GPU-hours by day, ${dates.format(1000 * fromS)} to ${dates.format(1000 * (toS - 1))}`;
    downloadBlob("savings.png", await pictureOf(this.bars, name));
  }

  async #saveTable() {
    const { from_s: from, to_s: to } = this.report;
    const query = new URLSearchParams({ from: String(from), to: String(to), by: this.choice.by, format: "csv" });
    const { signal } = this;
    try {
      const headers = { Accept: "text/csv" };
      const answer = await withSession(() => raw("GET", `/v1/savings?${query}`, { signal, headers }));
      downloadBlob("savings.csv", await answer.blob());
    } catch (error) {
      this.failed(error);
    }
  }

  #drawComparison(comparison, who) {
    if (!comparison) return put(this.places.comparison);
    const { pending, newest } = comparison;
    const isLive = pending !== null && ["queued", "running"].includes(pending.state);
    const disabledReason = compareRefusal(who, isLive);
    const options = { refused: this.places.problem, acted: () => this.again() };
    const key = JSON.stringify([comparison, disabledReason]);
    redraw(this.places.comparison, key, () => {
      const button = actionButton({ ...COMPARE, disabledReason }, options);
      return card(["Compared with no lending and no elasticity", button], standing(pending), comparisonOf(newest));
    });
    return undefined;
  }
}

const CHART_LABEL = "Bars by day: GPU-hours used on own nodes, used on loan, lent and idle, "
  + "and idle while jobs waited. The table below has the values.";
const COMPARE = {
  name: "Compare now",
  title: "Simulate the last seven days?",
  what: [
    "The jobs that were submitted in the last seven days are simulated three times: as today, without lending, and "
      + "without elasticity. This runs in the background and can take several minutes.",
  ],
  path: "/v1/savings/comparison",
  done: "The comparison is being computed.",
};

/** Returns the answer, or null if the caller may not read all queues. */
async function readable(answer) {
  try {
    return await answer;
  } catch (error) {
    if (error.status === 403) return null;
    throw error;
  }
}

function compareRefusal(who, isLive) {
  if (isLive) return "A comparison is being computed.";
  return may(who, "submitter") ? "" : "Requires the role submitter on all queues.";
}

function figures(report) {
  const { total } = report;
  const hours = hoursOf(total);
  const amounts = total.amounts;
  const amountOf = (value) => (amounts && value !== null ? money(value, report.currency) : null);
  const unknown = "not recorded in this time";
  const shareOfLent = hours.recoveredShare === null ? null : `${percent(hours.recoveredShare)} of lent GPU time`;
  const shareOfUse = hours.used ? `${percent(hours.lost / hours.used)} of use` : null;
  const below = (...parts) => parts.filter(Boolean).join(", ") || " ";
  return el(
    "dl",
    { class: "figures savings-figures" },
    figureOf("lent", "Lent to training", figure(hours.lent), "GPU-hours",
      hours.lent === null ? unknown : "used and idle"),
    figureOf("succeeded", "Recovered", figure(hours.recovered), "GPU-hours",
      below(amountOf(amounts?.on_loan), shareOfLent)),
    figureOf("running", "Used in total", figure(hours.used), "GPU-hours",
      below(amountOf(amounts?.used), "own and lent")),
    figureOf("failed", "Work lost", figure(hours.lost), "GPU-hours", below(amountOf(amounts?.lost), shareOfUse)),
    figureOf("queued", "Idle while jobs waited", figure(hours.idleWaiting), "GPU-hours",
      hours.idleWaiting === null ? unknown : below(amountOf(amounts?.idle_waiting), "training and lent nodes")),
  );
}

/** Says what the figures leave out. */
function notes(report) {
  const lines = [];
  if (!report.currency) {
    lines.push(["No prices are set, so the page shows GPU-hours only. Set ", el("code", {}, "EBBTIDE_GPU_PRICES"),
      " to see amounts."]);
  } else if (report.unpriced.length) {
    lines.push([`No price is set for ${report.unpriced.join(", ")}: amounts leave out these GPU models.`]);
  }
  if (report.recorded_since_s === null) {
    lines.push(["The use of pools was not recorded in this time, so idle GPU time is not known."]);
  } else if (report.recorded_since_s > report.from_s + HOUR_S) {
    lines.push(["Idle GPU time is recorded since ", when(report.recorded_since_s), "."]);
  }
  return lines.length > 0 && el("div", { class: "note savings-notes" }, lines.map((line) => el("p", {}, line)));
}

function legend() {
  const swatch = (state) => el("span", { class: "swatch", data: { part: state } });
  const entries = [...PARTS.map(([name, state]) => [name, state]), ["Idle while jobs waited", "waited"]];
  const items = entries.map(([name, state]) => el("li", {}, swatch(state), name));
  return el("ul", { class: "legend savings-legend" }, items);
}

function rowCard(report, saveTable) {
  const [name] = DIMENSIONS.find(([, value]) => value === report.by);
  const heading = `By ${name.startsWith("GPU") ? name : name.toLowerCase()}`;
  if (!report.items.length) return card(heading, empty("No GPU time in this time", "Choose a longer time above."));
  const isDay = report.by === "day";
  const items = isDay ? [...report.items].reverse() : [...report.items].sort((a, b) => b.gpu_s - a.gpu_s);
  const hours = (gpuS) => figure(toHours(gpuS));
  const amount = (value) => money(value, report.currency);
  const rows = items.slice(0, ROWS_MAX).map((row) => [
    isDay ? dates.format(1000 * row.day) : row[report.by] || UNNAMED[report.by] || "–",
    hours(row.gpu_s),
    hours(row.own_gpu_s),
    hours(row.lent_gpu_s),
    hours(row.lost_gpu_s),
    ...(isDay ? [hours(row.lent_idle_gpu_s), hours(row.idle_waiting_gpu_s)] : []),
    ...(row.amounts ? [row.amounts.used, row.amounts.on_loan].map(amount) : []),
  ]);
  const idle = isDay ? ["Lent and idle", "Idle, jobs waited"] : [];
  const numbers = ["Used", "On own nodes", "On loan", "Work lost", ...idle];
  const amounts = report.currency ? ["Amount", "Amount on loan"] : [];
  const columns = [[name], ...[...numbers, ...amounts].map((each) => [each, true])];
  const left = items.length - ROWS_MAX;
  const more = left > 0 && el("p", { class: "small muted" }, `and ${plural(left, "more row")} in the CSV file`);
  const button = el("button", { type: "button", on: { click: saveTable } }, "Save as CSV");
  return card([`${heading}, in GPU-hours`, button], table(`GPU-hours ${heading.toLowerCase()}`, columns, rows), more);
}

function standing(pending) {
  if (!pending) return null;
  const { state, reason, progress } = pending;
  if (state === "queued") return el("p", { class: "note" }, "A comparison waits for its turn.");
  if (state === "running") {
    const done = `${count(progress.jobs_done)} of ${count(progress.jobs_total)} simulated jobs have ended.`;
    return el("p", { class: "note" }, `A comparison is being computed: ${done}`);
  }
  const end = state === "failed" ? "failed" : "was cancelled";
  return el("p", { class: "note warn" }, `The latest comparison ${end}. ${reason}`);
}

function comparisonOf(newest) {
  if (!newest) {
    const about = "It simulates the jobs of the last seven days as today, without lending, and without elasticity.";
    return empty("No comparison yet", about);
  }
  const rows = ROWS.map(([name, of]) => [name, ...newest.outcomes.map(of)]);
  const columns = [["Simulated"], ...newest.outcomes.map((each) => [VARIANTS[each.variant], true])];
  const jobs = plural(newest.outcomes[0]?.jobs ?? 0, "recorded job");
  const about = el("p", { class: "small muted" }, `A simulation of ${jobs} on the fleet of `, when(newest.created_at_s),
    ", not a measurement. Jobs were submitted since ", when(newest.from_s), ".");
  const differences = newest.differences.length > 0
    && el("ul", { class: "small muted" }, newest.differences.map((each) => el("li", {}, `${sentence(each)}.`)));
  return [verdict(newest.outcomes), table("Comparison of variants", columns, rows), about, differences];
}

/** One sentence for each variant. */
function verdict(outcomes) {
  const lines = shortenings(outcomes).map(({ variant, share }) => {
    const size = percent(Math.abs(share));
    const direction = share >= 0 ? `${size} shorter` : `${size} longer`;
    const than = ` than ${VARIANTS[variant].toLowerCase()}.`;
    return el("li", {}, "Mean completion time is ", el("strong", {}, direction), than);
  });
  return el("ul", { class: "savings-verdict" }, lines);
}

const ROWS = [
  ["Jobs completed", (each) => `${count(each.completed)} of ${count(each.jobs)}`],
  ["Mean completion time", (each) => duration(each.jct_mean_s)],
  ["Completion time, p95", (each) => duration(each.jct_p95_s)],
  ["Mean wait for GPUs", (each) => duration(each.waiting_mean_s)],
  ["Time until the last job completed", (each) => duration(each.makespan_s)],
  ["On loan", (each) => `${figure(each.loaned_gpu_hours)} GPU-hours`],
  ["Idle while jobs waited", (each) => `${figure(each.idle_waiting_gpu_hours)} GPU-hours`],
  ["Work lost", (each) => `${figure(each.lost_gpu_hours)} GPU-hours`],
  ["Inference short because of loans", (each) => percent(each.short_ratio)],
];

function sentence(text) {
  return text[0].toUpperCase() + text.slice(1);
}
