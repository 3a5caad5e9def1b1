// Charts: uPlot in the console's colours, with the same values as an accessible table.

import { el, put, table } from "./dom.js";
import { figure, tickTimes, time, withUnit } from "./format.js";
import { colour, onTheme } from "./theme.js";

const TABLE_ROWS_MAX = 40;
const HEADROOM = 1.08; // top of the y axis as a multiple of the largest value
const TIME_PX = 76; // width of the longest tick label
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000];
const MISSING = "Charts need uPlot. Run `npm ci` in api/console and restart the service. "
  + "The tables below contain all values.";

/**
 * A chart as wide as `place`. `spec`: {label, series, bands, unit, xs, height, fromZero, together, gaps, drawn, picked,
 * headroom}. `series`: [{label, colour, dash, fill, swatch, stepped, width, points, unit, apart, quiet}] in the order
 * of `data` after x. `swatch` colours a series in the legend. An `apart` series appears in the legend only; a `quiet`
 * series is drawn but only listed in the table. `bands`: [[upper, lower, colour]] by series number from 1. `xs`: "time"
 * (Unix seconds) or the label of a number. Charts with the same `together` share the cursor. With `gaps`, lines break
 * at nulls. Calls `drawn(plot)` after each drawing and `picked(x)` for a click. Returns {update(data, at, span, drawn),
 * redraw(at)}: the legend shows index `at` at rest, the x axis covers `span`, and lines follow `drawn`, such as sums of
 * a stack, while legend and table show `data`.
 */
export function chart(place, spec, signal) {
  const { label, series, unit = "", xs = "time", height = 220 } = spec;
  const drawing = el("div", { class: "chart", role: "img", "aria-label": `${label}. See the table below.` });
  const details = el("details", {}, el("summary", {}, "Values as a table"));
  const rows = el("div", {});
  details.append(rows);
  details.open = !window.uPlot;
  put(place, window.uPlot ? drawing : el("p", { class: "note warn" }, MISSING), details);
  /** @type {uPlot.AlignedData} */
  const nothing = [[], ...series.map(() => [])];
  /** @type {{data: uPlot.AlignedData, drawn: uPlot.AlignedData, at: number, span: [number, number] | null}} */
  const shown = { data: nothing, drawn: nothing, at: 0, span: null };
  let plot = null;
  const fillTable = () => details.open && put(rows, figuresTable(label, series, shown.data, xs, unit));
  const draw = () => {
    plot?.destroy();
    plot = window.uPlot ? new window.uPlot(options(spec, widthOf(drawing), shown), shown.drawn, drawing) : null;
  };
  details.addEventListener("toggle", fillTable);
  draw();
  const observer = new ResizeObserver(() => plot?.setSize({ width: widthOf(drawing), height }));
  observer.observe(drawing);
  onTheme(draw, signal);
  signal.addEventListener("abort", () => {
    observer.disconnect();
    plot?.destroy();
  });
  return {
    redraw(at = shown.at) {
      shown.at = at;
      plot?.setLegend({ idx: at });
      plot?.redraw(false);
    },
    update(data, at = data[0].length - 1, span = null, drawn = data) {
      Object.assign(shown, { data, at, span, drawn });
      plot?.setData(drawn);
      plot?.setLegend({ idx: at });
      fillTable();
    },
  };
}

function widthOf(node) {
  return Math.max(200, Math.floor(node.getBoundingClientRect().width) || 600);
}

/** @returns {uPlot.Options} */
function options(spec, width, shown) {
  const { series, bands = [], unit = "", xs = "time", height = 220, fromZero = true, together } = spec;
  const { gaps = false, headroom = HEADROOM } = spec;
  const isTime = xs === "time";
  const grid = { stroke: colour("line"), width: 1 };
  const axis = { stroke: colour("muted"), font: "12px system-ui, sans-serif", grid, ticks: { show: false } };
  const ticksOf = (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick)));
  const times = { space: TIME_PX, values: (_, ticks) => tickTimes(ticks) };
  const below = { ...axis, size: 34, ...(isTime && times) };
  const beside = { ...axis, size: 52, values: ticksOf, ...(unit === "GPUs" && { incrs: WHOLE_STEPS }) };
  const atX = (_, value) => (value === null ? "–" : isTime ? time(value) : figure(value));
  return {
    width,
    height,
    cursor: { drag: { x: false, y: false }, points: { size: 7 }, ...(together && { sync: { key: together } }) },
    scales: {
      x: { time: isTime, range: (_, low, high) => shown.span ?? [low, high] },
      y: { range: (_, low, high) => yRange(low, high, fromZero, headroom) },
      apart: {},
    },
    hooks: {
      setCursor: [(plot) => plot.cursor.idx === null && plot.setLegend({ idx: shown.at })],
      draw: spec.drawn ? [spec.drawn] : [],
      ready: spec.picked ? [(plot) => plot.over.addEventListener("click", () => pickAt(plot, spec.picked))] : [],
    },
    axes: [below, beside],
    legend: { markers: { fill: (_, number) => colourOf(series[number - 1]) } },
    series: [{ label: isTime ? "Time" : xs, value: atX }, ...series.map((each) => line(each, unit, gaps, shown))],
    bands: bands.map(([upper, lower, name]) => ({ series: [upper, lower], fill: colour(name) })),
  };
}

/**
 * Returns the y range: from zero, or the range of the values with padding.
 * @returns {[number, number]}
 */
function yRange(low, high, fromZero, headroom) {
  if (fromZero || low === null) return [Math.min(0, low ?? 0), (high || 1) * headroom];
  const pad = 0.08 * (high - low || Math.abs(high) || 1);
  return [low - pad, high + pad];
}

function colourOf(series) {
  const name = series?.swatch ?? series?.fill;
  return name ? colour(name) : null;
}

function pickAt(plot, picked) {
  const { left } = plot.cursor;
  if (left >= 0) picked(plot.posToVal(left, "x"));
}

function line(series, unit, gaps, shown) {
  const { label, colour: name, dash, fill, stepped, width = 2, points = false, apart, quiet, unit: own } = series;
  const isMissing = (value) => value === null || value === undefined;
  const valueAt = (drawn, number, at) => (isMissing(at) ? drawn : shown.data[number]?.[at]);
  const format = (value) => (isMissing(value) ? "–" : withUnit(figure(value), own ?? unit, value));
  return {
    label,
    class: quiet ? "quiet-series" : apart ? "apart-series" : undefined,
    scale: apart ? "apart" : "y",
    stroke: apart ? "transparent" : colour(name),
    width: apart ? 0 : width,
    dash,
    fill: fill && colour(fill),
    paths: stepped ? window.uPlot.paths.stepped({ align: 1 }) : undefined,
    points: { show: points && !apart, size: 6 },
    spanGaps: !gaps,
    value: (_, drawn, number, at) => format(valueAt(drawn, number, at)),
  };
}

/** Renders at most TABLE_ROWS_MAX evenly spaced rows, including the newest. */
function figuresTable(label, series, data, kind, unit) {
  const [xs, ...columns] = data;
  const step = Math.max(1, Math.ceil(xs.length / TABLE_ROWS_MAX));
  const rows = xs.flatMap((x, at) => {
    if ((xs.length - 1 - at) % step) return [];
    return [[kind === "time" ? time(x) : figure(x), ...columns.map((column) => figure(column[at]))]];
  });
  const heads = series.map((each) => [each.unit ?? unit ? `${each.label} (${each.unit ?? unit})` : each.label, true]);
  return table(label, [[kind === "time" ? "Time" : kind, false], ...heads], rows.reverse());
}
