// Charts: uPlot in the console's colours, with the same values as an accessible table.

import { distributions, xOf, xRange, xTicks, yRange, yTicks } from "./chart_axes.js";
import { el, put, table } from "./dom.js";
import { figure, withUnit } from "./format.js";
import { colour, onTheme } from "./theme.js";

const TABLE_ROWS_MAX = 40;
const FONT = "12px system-ui, sans-serif";
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000];
const MISSING = "Charts need uPlot. Run `npm ci` in api/console and restart the service. "
  + "The tables below contain all values.";

/**
 * Draws a chart as wide as `place`. Returns {update(data, at, span, drawn), redraw(at)}: the legend shows index `at` at
 * rest, and the x axis covers `span`. Lines follow `drawn`, such as sums of a stack; legend and table show `data`.
 * @param {HTMLElement} place
 * @param {import("../types/charts").ChartSpec} spec
 * @param {AbortSignal} signal
 */
export function chart(place, spec, signal) {
  const { series, height = 220 } = spec;
  const drawing = el("div", { class: "chart" });
  const details = el("details", {}, el("summary", {}, "Values as a table"));
  const rows = el("div", {});
  details.append(rows);
  details.open = !window.uPlot;
  put(place, window.uPlot ? drawing : el("p", { class: "note warn" }, MISSING), details);
  /** @type {uPlot.AlignedData} */
  const nothing = [[], ...series.map(() => [])];
  const all = el("button", { type: "button", class: "small chart-all", hidden: true }, "Show all");
  const shown = { data: nothing, drawn: nothing, at: 0, span: null, zoom: null, hidden: new Set(), all };
  /** @type {uPlot} */
  let plot = null;
  all.addEventListener("click", () => showAll(plot, spec));
  const fillTable = () => details.open && put(rows, figuresTable(spec, shown.data));
  const draw = () => {
    plot?.destroy();
    plot = window.uPlot ? create(spec, drawing, shown) : null;
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

function create(spec, drawing, shown) {
  const { zoom } = shown;
  const plot = new window.uPlot(options(spec, widthOf(drawing), shown), shown.drawn, drawing);
  const wrap = plot.root.querySelector(".u-wrap");
  wrap.setAttribute("role", "img");
  wrap.setAttribute("aria-label", `${spec.label}. See the table below.`);
  if (spec.zoom) drawing.append(shown.all);
  if (zoom) plot.setScale("x", zoom);
  return plot;
}

function widthOf(node) {
  return Math.max(200, Math.floor(node.getBoundingClientRect().width) || 600);
}

/** @returns {uPlot.Options} */
function options(spec, width, shown) {
  const { series, bands = [], unit = "", xs = "time", height = 220, together, gaps = false, zoom = false } = spec;
  const x = xOf(spec);
  const kinds = distributions(spec);
  return {
    width,
    height,
    cursor: { drag: { x: zoom, y: false }, points: { size: 7 }, ...(together && { sync: { key: together } }) },
    scales: {
      x: { time: xs === "time", ...kinds.x, range: (_, low, high) => shownRange(spec, shown, low, high) },
      y: { ...kinds.y, range: (_, low, high) => yRange(spec, low, high) },
      apart: {},
    },
    hooks: hooks(spec, shown),
    axes: axes(spec, x),
    legend: { markers: { fill: (_, number) => colourOf(series[number - 1]) } },
    series: [
      { label: x.label, value: (_, value) => (value === null ? "–" : x.format(value)) },
      ...series.map((each, at) => ({ ...line(each, { unit, gaps, shown }), show: !shown.hidden.has(at + 1) })),
    ],
    bands: bands.map(([upper, lower, name]) => ({ series: [upper, lower], fill: colour(name) })),
  };
}

/**
 * @param {import("../types/charts").ChartSpec} spec
 * @returns {uPlot.Hooks.Arrays}
 */
function hooks(spec, shown) {
  const { marks = [], drawn, picked, zoom } = spec;
  return {
    setCursor: [(plot) => plot.cursor.idx === null && plot.setLegend({ idx: shown.at })],
    draw: [(plot) => marks.forEach((mark) => drawMark(plot, mark)), ...(drawn ? [drawn] : [])],
    setScale: zoom ? [(plot, key) => key === "x" && noteZoom(plot, shown)] : [],
    setSeries: [(plot) => noteHidden(plot, shown)],
    ready: [
      (plot) => makeTogglable(plot, spec),
      ...(picked ? [(plot) => plot.over.addEventListener("click", () => pickAt(plot, picked))] : []),
    ],
  };
}

function axes(spec, x) {
  const grid = { stroke: colour("line"), width: 1 };
  const axis = { stroke: colour("muted"), font: FONT, grid, ticks: { show: false } };
  const ticksOf = (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick)));
  return [
    { ...axis, size: 34, space: x.stepPx, values: (_, ticks) => x.ticks(ticks), ...xTicks(spec) },
    { ...axis, size: 52, values: ticksOf, ...(spec.unit === "GPUs" && { incrs: WHOLE_STEPS }), ...yTicks(spec) },
  ];
}

/** Returns the shown x range: all data, or the part that the user has selected. */
function shownRange(spec, shown, low, high) {
  const [xs] = shown.drawn;
  const isAll = !xs.length || (low <= xs[0] && high >= xs.at(-1));
  return isAll ? shown.span ?? xRange(spec, low, high) : [low, high];
}

/** Remembers the zoom for the next drawing, and offers to show everything again. */
function noteZoom(plot, shown) {
  const [xs] = shown.drawn;
  const { min, max } = plot.scales.x;
  const [low, high] = shown.span ?? [xs[0], xs.at(-1)];
  const isZoomed = xs.length > 1 && (min > low || max < high);
  shown.zoom = isZoomed ? { min, max } : null;
  shown.all.hidden = !isZoomed;
}

/**
 * @param {uPlot} plot
 * @param {import("../types/charts").ChartSpec} spec
 */
function showAll(plot, { together }) {
  const plots = together ? window.uPlot.sync(together).plots : [plot];
  for (const each of plots) each.setData(each.data);
}

/** Lets the keyboard show and hide series, as uPlot does for clicks on the legend. */
function makeTogglable(plot, { label, series }) {
  const legend = plot.root.querySelector(".u-legend");
  legend.setAttribute("role", "group");
  legend.setAttribute("aria-label", `Legend of ${label}`);
  for (const each of legend.querySelectorAll("tbody, tr, td")) each.setAttribute("role", "presentation");
  legend.querySelectorAll("th").forEach((head, at) => {
    if (at === 0 || series[at - 1].apart) head.setAttribute("role", "presentation");
    else makeButton(head, () => plot.setSeries(at, { show: !plot.series[at].show }));
  });
  markPressed(plot);
}

function makeButton(node, press) {
  const isPress = ({ key }) => key === "Enter" || key === " ";
  node.setAttribute("role", "button");
  node.tabIndex = 0;
  node.addEventListener("keydown", (event) => {
    if (!isPress(event)) return;
    event.preventDefault();
    press();
  });
}

function noteHidden(plot, shown) {
  shown.hidden = new Set(plot.series.flatMap((each, at) => (each.show ? [] : [at])));
  markPressed(plot);
}

function markPressed(plot) {
  plot.root.querySelectorAll(".u-legend th").forEach((head, at) => {
    if (head.getAttribute("role") === "button") head.setAttribute("aria-pressed", String(plot.series[at].show));
  });
}

function colourOf(series) {
  const name = series?.swatch ?? series?.fill;
  return name ? colour(name) : null;
}

function pickAt(plot, picked) {
  const { left } = plot.cursor;
  if (left >= 0) picked(plot.posToVal(left, "x"));
}

/** Draws a dotted vertical line with its label above the plot. */
function drawMark(plot, { x, label }) {
  const { ctx, bbox } = plot;
  const ratio = window.devicePixelRatio || 1;
  const at = plot.valToPos(x, "x", true);
  if (at < bbox.left || at > bbox.left + bbox.width) return;
  const isRight = at > bbox.left + bbox.width / 2;
  ctx.save();
  ctx.strokeStyle = colour("line-strong");
  ctx.fillStyle = colour("muted");
  ctx.lineWidth = ratio;
  ctx.setLineDash([2 * ratio, 3 * ratio]);
  ctx.beginPath();
  ctx.moveTo(at, bbox.top);
  ctx.lineTo(at, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = isRight ? "right" : "left";
  ctx.fillText(label, at + (isRight ? -5 : 5) * ratio, bbox.top - 4 * ratio);
  ctx.restore();
}

/** @param {import("../types/charts").ChartSeries} series */
function line(series, { unit, gaps, shown }) {
  const { label, colour: name, dash, fill, width = 2, apart, quiet, unit: own } = series;
  const isMissing = (value) => value === null || value === undefined;
  const valueAt = (drawn, number, at) => (isMissing(at) ? drawn : shown.data[number]?.[at]);
  const format = (value) => (isMissing(value) ? "–" : withUnit(figure(value), own ?? unit, value));
  return {
    label,
    class: quiet ? "quiet-series" : apart ? "apart-series" : undefined,
    scale: apart ? "apart" : "y",
    stroke: apart || !name ? "transparent" : colour(name),
    width: apart ? 0 : width,
    dash,
    fill: fill && colour(fill),
    paths: pathsOf(series),
    points: pointsOf(series),
    spanGaps: !gaps,
    value: (_, drawn, number, at) => format(valueAt(drawn, number, at)),
  };
}

/**
 * @param {import("../types/charts").ChartSeries} series
 * @returns {uPlot.Series.Points}
 */
function pointsOf({ colour: name, points = false, apart }) {
  if (!points || apart) return { show: false };
  const isOnly = points === "only";
  return { show: true, size: isOnly ? 9 : 6, width: 2, fill: isOnly ? colour("surface") : colour(name) };
}

/** @param {import("../types/charts").ChartSeries} series */
function pathsOf({ bars, stepped, points }) {
  if (points === "only") return () => null;
  if (bars) return window.uPlot.paths.bars({ size: [0.7, 48], radius: 0.1 });
  return stepped ? window.uPlot.paths.stepped({ align: 1 }) : undefined;
}

/** Renders at most TABLE_ROWS_MAX evenly spaced rows, including the newest. */
function figuresTable(spec, data) {
  const { label, series, unit = "" } = spec;
  const x = xOf(spec);
  const [xs, ...columns] = data;
  const step = Math.max(1, Math.ceil(xs.length / TABLE_ROWS_MAX));
  const rows = xs.flatMap((value, at) => {
    if ((xs.length - 1 - at) % step) return [];
    return [[x.format(value), ...columns.map((column) => figure(column[at]))]];
  });
  const heads = series.map((each) => [each.unit ?? unit ? `${each.label} (${each.unit ?? unit})` : each.label, true]);
  return table(label, [[x.label, false], ...heads], rows.reverse());
}
