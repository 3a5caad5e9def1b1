// The chart of the savings page: one bar a day. It is a canvas, so the page and the PNG file share the code.

import { PARTS, ticksOf } from "./savings_figures.js";
import { colour } from "./theme.js";

export const FONT = "system-ui, sans-serif";
const LEFT_PX = 58;
const BOTTOM_PX = 28;
const TOP_PX = 14;
const LABEL_PX = 54; // width of the label of a day
const dates = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
const numbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

/**
 * @typedef {{dayS: number, parts: number[], idleWaiting: number}} Bar
 * @typedef {{x: number, y: number, width: number, height: number}} Area
 */

/**
 * Draws the bars into a rectangle of the canvas.
 * @param {CanvasRenderingContext2D} context
 * @param {Bar[]} bars
 * @param {Area} area
 */
export function drawBars(context, bars, area) {
  const plot = {
    x: area.x + LEFT_PX,
    y: area.y + TOP_PX,
    width: area.width - LEFT_PX - 8,
    height: area.height - TOP_PX - BOTTOM_PX,
  };
  const sum = (bar) => bar.parts.reduce((total, part) => total + part, 0);
  const ticks = ticksOf(Math.max(...bars.map((bar) => Math.max(sum(bar), bar.idleWaiting)), 0));
  const top = ticks.at(-1);
  const yOf = (value) => plot.y + plot.height * (1 - value / top);
  drawAxis(context, plot, ticks, yOf);
  const stepPx = plot.width / bars.length;
  const barPx = Math.max(1, Math.min(40, stepPx * 0.72));
  const every = Math.ceil(LABEL_PX / stepPx);
  bars.forEach((bar, at) => {
    const middle = plot.x + (at + 0.5) * stepPx;
    drawBar(context, bar, { x: middle - barPx / 2, width: barPx }, yOf);
    if (at % every === 0) {
      context.fillStyle = colour("muted");
      context.textAlign = "center";
      context.fillText(dates.format(new Date(1000 * bar.dayS)), middle, plot.y + plot.height + 18);
    }
  });
}

/**
 * Draws the horizontal lines of the ticks, and their labels.
 * @param {CanvasRenderingContext2D} context
 * @param {{x: number, y: number, width: number, height: number}} plot
 * @param {number[]} ticks
 * @param {(value: number) => number} yOf
 */
export function drawAxis(context, plot, ticks, yOf) {
  context.font = `12px ${FONT}`;
  context.textAlign = "right";
  context.lineWidth = 1;
  for (const tick of ticks) {
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(plot.x, Math.round(yOf(tick)) + 0.5);
    context.lineTo(plot.x + plot.width, Math.round(yOf(tick)) + 0.5);
    context.stroke();
    context.fillStyle = colour("muted");
    context.fillText(numbers.format(tick), plot.x - 8, yOf(tick) + 4);
  }
}

/** Draws the parts on top of one another, hatched where GPUs were idle, and a line where idle GPUs had takers. */
function drawBar(context, bar, { x, width }, yOf) {
  let below = 0;
  bar.parts.forEach((part, at) => {
    const [top, bottom] = [yOf(below + part), yOf(below)];
    below += part;
    fillPart(context, at, { x, y: top, width, height: bottom - top });
  });
  if (bar.idleWaiting > 0) {
    context.strokeStyle = colour("recalled");
    context.lineWidth = 3;
    context.beginPath();
    context.moveTo(x - 3, yOf(bar.idleWaiting));
    context.lineTo(x + width + 3, yOf(bar.idleWaiting));
    context.stroke();
  }
}

function fillPart(context, at, { x, y, width, height }) {
  if (height <= 0) return;
  const [, name] = PARTS[at];
  context.fillStyle = colour(name);
  context.fillRect(x, y, width, height);
  if (name !== "idle") return;
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour("lent");
  context.lineWidth = 1.5;
  context.beginPath();
  for (let from = y - width; from < y + height; from += 6) {
    context.moveTo(x, from + width);
    context.lineTo(x + width, from);
  }
  context.stroke();
  context.restore();
}

const LEGEND = [...PARTS.map(([name], at) => [name, at]), ["Idle while jobs waited", "line"]];

/**
 * Draws the legend in one row and returns its width.
 * @param {CanvasRenderingContext2D} context
 * @param {{x: number, y: number}} at
 */
export function drawLegend(context, { x, y }) {
  context.font = `13px ${FONT}`;
  context.textAlign = "left";
  let left = x;
  for (const [name, part] of LEGEND) {
    if (part === "line") {
      context.fillStyle = colour("recalled");
      context.fillRect(left, y + 5, 16, 3);
    } else fillPart(context, Number(part), { x: left, y, width: 14, height: 13 });
    context.fillStyle = colour("text");
    context.fillText(String(name), left + 21, y + 11);
    left += 21 + context.measureText(String(name)).width + 22;
  }
  return left - x;
}

/**
 * Sizes a canvas for the screen's pixels and returns its context in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function contextOf(canvas, width, height, ratio = devicePixelRatio || 1) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

/**
 * Draws the whole picture, with title and legend, for a file.
 * @param {Bar[]} bars
 * @param {string} title
 * @returns {Promise<Blob>}
 */
export function pictureOf(bars, title) {
  return drawPicture(title, (context, area) => {
    drawLegend(context, { x: 24, y: 58 });
    drawBars(context, bars, area);
  });
}

/**
 * Draws a picture with a title for a file. The legend has its place between the title and the area of the chart.
 * @param {string} title
 * @param {(context: CanvasRenderingContext2D, area: Area) => void} draw
 * @returns {Promise<Blob>}
 */
export function drawPicture(title, draw) {
  const [width, height] = [1200, 560];
  const canvas = document.createElement("canvas");
  const context = contextOf(canvas, width, height, 2);
  context.fillStyle = colour("surface");
  context.fillRect(0, 0, width, height);
  context.fillStyle = colour("text");
  context.font = `600 18px ${FONT}`;
  context.fillText(title, 24, 38);
  draw(context, { x: 12, y: 84, width: width - 36, height: height - 100 });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
