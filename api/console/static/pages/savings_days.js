// Card of the savings page: the comparisons that the controller makes once a day, as lines over days.

import { raw, withSession } from "../api.js";
import { drawLines, pictureOfDays } from "../comparison_chart.js";
import { FIGURES, VARIANTS, seriesOf, standingFailure } from "../comparison_series.js";
import { downloadBlob } from "../csv_text.js";
import { card, el, empty, put, redraw, table } from "../dom.js";
import { figure } from "../format.js";
import { contextOf } from "../savings_chart.js";
import { onTheme } from "../theme.js";

const CHART_PX = 260;
const dates = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric", timeZone: "UTC" });
const LABEL = "Lines by day: as today, without lending, and without elasticity. The table below has the values.";
const STATES = {
  running: "is being computed",
  succeeded: "succeeded",
  failed: "failed",
  skipped: "skipped",
  missing: "not made",
};

export class DailyComparisons {
  chosen = 0;

  /**
   * @param {HTMLElement} place
   * @param {AbortSignal} signal
   * @param {(error: any) => void} failed
   */
  constructor(place, signal, failed) {
    this.place = place;
    this.signal = signal;
    this.failed = failed;
    addEventListener("resize", () => this.#drawCanvas(), { signal });
    onTheme(() => this.#drawCanvas(), signal);
  }

  /** Shows the days of the API; null: the caller may not read them. */
  update(view, from) {
    this.view = view;
    this.from = from;
    if (!view) return put(this.place);
    redraw(this.place, JSON.stringify(view), () => this.#build());
    this.#drawCanvas();
    return undefined;
  }

  #build() {
    const { items, is_enabled: isEnabled } = this.view;
    const off = !isEnabled && el("p", { class: "note" }, "Daily comparisons are off. Set ",
      el("code", {}, "EBBTIDE_DAILY_COMPARISON"), " to true to make them.");
    if (!items.length) {
      const about = "The controller simulates the jobs of the last seven days once a day, without lending and without "
        + "elasticity. The first comparison follows ten minutes after it has started.";
      return card("Compared day by day", off, isEnabled && empty("No daily comparison yet", about));
    }
    const button = (name, act) => el("button", { type: "button", on: { click: () => act() } }, name);
    const csv = button("Save as CSV", () => this.#saveTable());
    const png = button("Save as PNG", () => this.#savePicture());
    const heading = ["Compared day by day", el("span", { class: "row" }, csv, png)];
    this.canvas = el("canvas", { class: "savings-chart", role: "img", "aria-label": LABEL });
    this.values = el("div");
    const details = el("details", {}, el("summary", {}, "Values as a table"), this.values);
    const about = el("p", { class: "small muted" },
      "Each day simulates the jobs of the seven days before. These are estimates, not measurements.");
    const drawing = el("div", {}, this.canvas);
    this.#fillTable();
    return card(heading, off, failureNote(items), this.#figureChoice(), legend(), drawing, details, about);
  }

  #figureChoice() {
    const options = FIGURES.map(([name, unit], at) => {
      return el("option", { value: String(at), selected: at === this.chosen }, `${name}, in ${unit}`);
    });
    const choose = ({ target }) => {
      this.chosen = Number(target.value);
      this.#fillTable();
      this.#drawCanvas();
    };
    const select = el("select", { id: "compared-figure", on: { change: choose } }, options);
    return el("label", { class: "row small savings-days-choice" }, "Show", select);
  }

  #series() {
    return seriesOf(this.view.items, FIGURES[this.chosen][2]);
  }

  #fillTable() {
    const { days, lines } = this.#series();
    const columns = [["Day"], ...VARIANTS.map(([name]) => [name, true]), ["State"]];
    const rows = days.map((dayS, at) => {
      const { state, reason } = this.view.items[at];
      const told = reason ? `${STATES[state]}: ${reason}` : STATES[state];
      return [dates.format(1000 * dayS), ...lines.map((line) => figure(line[at])), told];
    });
    const [name, unit] = FIGURES[this.chosen];
    put(this.values, table(`${name} by day, in ${unit}`, columns, rows.reverse()));
  }

  #drawCanvas() {
    if (!this.canvas?.isConnected) return;
    const width = Math.max(220, Math.floor(this.canvas.parentElement.clientWidth));
    drawLines(contextOf(this.canvas, width, CHART_PX), this.#series(), { x: 0, y: 0, width, height: CHART_PX });
  }

  async #savePicture() {
    const [name, unit] = FIGURES[this.chosen];
    const title = `${name}, in ${unit}, by day of the comparison (simulated)`;
    downloadBlob("savings-comparisons.png", await pictureOfDays(this.#series(), title));
  }

  async #saveTable() {
    const query = new URLSearchParams({ from: this.from, format: "csv" });
    const { signal } = this;
    try {
      const ask = () => raw("GET", `/v1/savings/comparison/days?${query}`, { signal, headers: { Accept: "text/csv" } });
      const answer = await withSession(ask);
      downloadBlob("savings-comparisons.csv", await answer.blob());
    } catch (error) {
      this.failed(error);
    }
  }
}

function failureNote(items) {
  const failed = standingFailure(items);
  if (!failed) return null;
  const day = dates.format(1000 * failed.day);
  return el("p", { class: "note warn" }, `The comparison of ${day} failed: ${failed.reason}.`);
}

function legend() {
  const items = VARIANTS.map(([name, variant]) => {
    return el("li", {}, el("span", { class: "savings-line", data: { variant } }), name);
  });
  const mark = (state, sign, name) => el("li", {}, el("span", { class: "savings-mark", data: { state } }, sign), name);
  const marks = [mark("failed", "×", "failed"), mark("skipped", "○", "skipped or not made")];
  return el("ul", { class: "legend" }, items, marks);
}
