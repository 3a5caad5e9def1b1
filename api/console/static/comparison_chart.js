// Chart of the daily comparisons: one line for each variant. It is a canvas: the page and the PNG file share the code.

import { VARIANTS, largestOf, positionOf, runsOf } from "./comparison_series.js";
import { FONT, drawAxis, drawPicture } from "./savings_chart.js";
import { ticksOf } from "./savings_figures.js";
import { colour } from "./theme.js";

const LEFT_PX = 58;
const RIGHT_PX = 24;
const BOTTOM_PX = 44;
const TOP_PX = 14;
const LABEL_PX = 62;
const dates = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

/**
 * Draws the lines into a rectangle of the canvas, and marks days that failed, were skipped or are missing below them.
 * @param {CanvasRenderingContext2D} context
 * @param {import("./comparison_series.js").Series} series
 * @param {import("./savings_chart.js").Area} area
 */
export function drawLines(context, { days, states, lines }, area) {
  const plot = {
    x: area.x + LEFT_PX,
    y: area.y + TOP_PX,
    width: area.width - LEFT_PX - RIGHT_PX,
    height: area.height - TOP_PX - BOTTOM_PX,
  };
  const ticks = ticksOf(largestOf(lines));
  const yOf = (value) => plot.y + plot.height * (1 - value / ticks.at(-1));
  const xOf = (at) => plot.x + plot.width * positionOf(days, at);
  drawAxis(context, plot, ticks, yOf);
  lines.forEach((line, at) => drawLine(context, line, VARIANTS[at], { xOf, yOf }));
  context.setLineDash([]);
  context.textAlign = "center";
  let freeX = -Infinity;
  days.forEach((dayS, at) => {
    const bottom = plot.y + plot.height;
    if (states[at] === "failed") drawCross(context, xOf(at), bottom + 12);
    if (["skipped", "missing"].includes(states[at])) drawRing(context, xOf(at), bottom + 12);
    if (xOf(at) < freeX) return;
    freeX = xOf(at) + LABEL_PX;
    context.fillStyle = colour("muted");
    context.fillText(dates.format(new Date(1000 * dayS)), xOf(at), bottom + 34);
  });
}

function drawLine(context, line, [, , name, dash], { xOf, yOf }) {
  context.strokeStyle = colour(name);
  context.fillStyle = colour(name);
  context.lineWidth = 2.2;
  context.setLineDash(dash);
  for (const run of runsOf(line)) {
    context.beginPath();
    run.forEach(([at, value]) => context.lineTo(xOf(at), yOf(value)));
    context.stroke();
    for (const [at, value] of run) {
      context.beginPath();
      context.arc(xOf(at), yOf(value), 3, 0, 2 * Math.PI);
      context.fill();
    }
  }
}

function drawCross(context, x, y) {
  context.strokeStyle = colour("danger");
  context.lineWidth = 2;
  context.beginPath();
  for (const [dx, dy] of [[4, 4], [4, -4]]) {
    context.moveTo(x - dx, y - dy);
    context.lineTo(x + dx, y + dy);
  }
  context.stroke();
}

function drawRing(context, x, y) {
  context.strokeStyle = colour("muted");
  context.lineWidth = 1.5;
  context.beginPath();
  context.arc(x, y, 3.5, 0, 2 * Math.PI);
  context.stroke();
}

/**
 * Draws the whole picture, with title and legend, for a file.
 * @param {import("./comparison_series.js").Series} series
 * @param {string} title
 * @returns {Promise<Blob>}
 */
export function pictureOfDays(series, title) {
  return drawPicture(title, (context, area) => {
    drawLegend(context);
    drawLines(context, series, area);
  });
}

function drawLegend(context) {
  context.font = `13px ${FONT}`;
  let left = 24;
  for (const [label, , name, dash] of VARIANTS) {
    context.strokeStyle = colour(name);
    context.lineWidth = 2.2;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(left, 66);
    context.lineTo(left + 26, 66);
    context.stroke();
    context.fillStyle = colour("text");
    context.fillText(label, left + 34, 70);
    left += 34 + context.measureText(label).width + 26;
  }
  context.setLineDash([]);
}
