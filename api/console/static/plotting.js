// Curves: uPlot in the console's colours, with the same figures as a table for those who do not see them.

import { el, put, table } from "./dom.js";
import { figure, tickTimes, time } from "./format.js";
import { colour, onTheme } from "./theme.js";

const TABLE_ROWS_MAX = 40;
const MISSING = "The charts need uPlot, which npm installs: run `npm ci` in api/console and start the service again. Every figure stands in the tables below.";

/**
 * A chart that follows its place's width. `series`: [{label, colour, dash, fill, stepped, width, points, hidden}] in the
 * order of `data` after x; `bands`: [[upper, lower, colour]] by series number from 1; `unit` stands beside the values;
 * `xs`: "time" (seconds since 1970) or the name of a number. Gives {update(data, at)}: the legend rests at that index.
 */
export function chart(place, { label, series, bands = [], unit = "", xs = "time", height = 220 }, signal) {
  const drawing = el("div", { class: "chart", role: "img", "aria-label": `${label}. The figures follow as a table.` });
  const details = el("details", {}, el("summary", {}, "Figures as a table"));
  const rows = el("div", {});
  details.append(rows);
  put(place, window.uPlot ? drawing : el("p", { class: "note warn" }, MISSING), details);
  let data = [[], ...series.map(() => [])];
  let plot = null;
  let restAt = 0;
  const fillTable = () => details.open && put(rows, figuresTable(label, series, data, xs, unit));
  const draw = () => {
    plot?.destroy();
    plot = window.uPlot ? new window.uPlot(options({ series, bands, unit, xs, height, width: widthOf(drawing), rest: () => restAt }), data, drawing) : null;
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
    update(next, at = next[0].length - 1) {
      data = next;
      restAt = at;
      plot?.setData(data);
      plot?.setLegend({ idx: restAt });
      fillTable();
    },
  };
}

function widthOf(node) {
  return Math.max(200, Math.floor(node.getBoundingClientRect().width) || 600);
}

function options({ series, bands, unit, xs, height, width, rest }) {
  const isTime = xs === "time";
  const axis = { stroke: colour("muted"), font: "12px system-ui, sans-serif", grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
  const lines = series.map((each) => line(each, unit));
  const byColour = ([upper, lower, name]) => ({ series: [upper, lower], fill: colour(name) });
  return {
    width,
    height,
    cursor: { drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: { time: isTime }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.08] } },
    hooks: { setCursor: [(plot) => plot.cursor.idx === null && plot.setLegend({ idx: rest() })] },
    axes: [isTime ? { ...axis, size: 34, values: (_, ticks) => tickTimes(ticks) } : { ...axis, size: 34 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }],
    series: [{ label: isTime ? "Time" : xs, value: (_, value) => (value === null ? "–" : isTime ? time(value) : figure(value)) }, ...lines],
    bands: bands.map(byColour),
  };
}

function line({ label, colour: name, dash, fill, stepped, width = 2, points = false, hidden = false }, unit) {
  return {
    label,
    stroke: hidden ? "transparent" : colour(name),
    width: hidden ? 0 : width,
    dash,
    fill: fill && colour(fill),
    paths: stepped ? window.uPlot.paths.stepped({ align: 1 }) : undefined,
    points: { show: points, size: 6 },
    spanGaps: true,
    value: (_, value) => (value === null || value === undefined ? "–" : `${figure(value)}${unit && ` ${unit}`}`),
  };
}

/** At most TABLE_ROWS_MAX rows, evenly taken, the newest always among them. */
function figuresTable(label, series, [xs, ...columns], kind, unit) {
  const step = Math.max(1, Math.ceil(xs.length / TABLE_ROWS_MAX));
  const rows = xs.flatMap((x, at) => {
    if ((xs.length - 1 - at) % step) return [];
    return [[kind === "time" ? time(x) : figure(x), ...columns.map((column) => figure(column[at]))]];
  });
  const heads = series.map((each) => [unit ? `${each.label} (${unit})` : each.label, true]);
  return table(label, [[kind === "time" ? "Time" : kind, false], ...heads], rows.reverse());
}
