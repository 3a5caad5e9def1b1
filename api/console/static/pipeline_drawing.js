// Drawing of a pipeline schedule: passes of each stage over one step, on a canvas.

import { el, table } from "./dom.js";
import { duration, percent, plural } from "./format.js";
import { scheduleOf } from "./pipeline_schedule.js";
import { colour, onTheme } from "./theme.js";

const ROW_PX = 34;
const AXIS_PX = 22;
const LEFT_PX = 62;
const NUMBER_PX = 15; // least width of a pass that shows its micro-batch
const PASSES_MAX = 20_000;
const CHUNK_TINTS = 5;

/**
 * Draws the schedule of a plan with several stages. Returns null for other plans.
 * @param {any} plan
 * @param {any} inspection
 * @param {AbortSignal} signal
 */
export function pipelineDrawing(plan, inspection, signal) {
  const devices = inspection?.devices.length ?? 0;
  const passes = 2 * devices * plan.micro_batches * plan.schedule.interleave;
  if (devices < 2 || passes > PASSES_MAX) return null;
  const schedule = scheduleOf(plan, inspection);
  const busy = devicesBusy(schedule, devices);
  const label = `Pipeline schedule ${plan.schedule.name}: ${plural(devices, "stage")}, `
    + `${plural(plan.micro_batches, "micro-batch", "micro-batches")}. See the table below.`;
  const canvas = el("canvas", { role: "img", "aria-label": label, height: devices * ROW_PX + AXIS_PX });
  const hint = el("p", { class: "small muted pass-hint" }, summary(schedule, plan));
  const paint = () => draw(canvas, schedule, { devices, interleave: plan.schedule.interleave });
  const observer = new ResizeObserver(paint);
  observer.observe(canvas);
  onTheme(paint, signal);
  signal.addEventListener("abort", () => observer.disconnect());
  canvas.addEventListener("pointermove", (event) => {
    const found = passAt(event, canvas, schedule);
    hint.textContent = found ? describe(found, plan) : summary(schedule, plan);
  });
  canvas.addEventListener("pointerleave", () => {
    hint.textContent = summary(schedule, plan);
  });
  const rows = busy.map((each, at) => [`Stage ${at + 1}`, duration(each.busyS), duration(each.restS),
    duration(each.idleS), percent(each.idleS / schedule.wholeS)]);
  const columns = [["Stage"], ["Passes", true], ["Data groups, optimizer", true], ["Idle", true], ["Idle share", true]];
  const listed = table("Pipeline schedule", columns, rows);
  const details = el("details", {}, el("summary", {}, "Schedule as a table"), listed);
  return el("div", { class: "pipeline" }, legend(), canvas, hint, details);
}

function devicesBusy(schedule, devices) {
  return Array.from({ length: devices }, (_, device) => {
    const own = schedule.passes.filter((pass) => pass.device === device);
    const busyS = own.reduce((sum, pass) => sum + pass.toS - pass.fromS, 0);
    const restS = schedule.ends[device].toS - schedule.ends[device].fromS;
    return { busyS, restS, idleS: Math.max(0, schedule.wholeS - busyS - restS) };
  });
}

function legend() {
  const swatch = (kind, name) => el("li", {}, el("span", { class: `swatch pass-${kind}` }), name);
  const names = [["forward", "forward"], ["backward", "backward"], ["rest", "data groups, optimizer, host"]];
  return el("ul", { class: "legend", "aria-label": "Kinds of passes" },
    names.map(([kind, name]) => swatch(kind, name)), swatch("idle", "idle (bubble)"));
}

function summary(schedule, plan) {
  const batches = plural(plan.micro_batches, "micro-batch", "micro-batches");
  const drawnS = duration(schedule.wholeS);
  return `${plan.schedule.name}: ${batches} in ${drawnS}, drawn pass by pass from the predicted times of each stage; `
    + `the cost model predicts ${duration(plan.iteration_time_s)}. Numbers are micro-batches.`;
}

function describe(pass, plan) {
  const chunk = plan.schedule.interleave > 1 ? `, chunk ${pass.chunk + 1}` : "";
  return `Stage ${pass.device + 1}: ${pass.kind} pass of micro-batch ${pass.micro + 1}${chunk}, `
    + `${duration(pass.fromS)} to ${duration(pass.toS)}.`;
}

function passAt(event, canvas, schedule) {
  const device = Math.floor(event.offsetY / ROW_PX);
  const atS = ((event.offsetX - LEFT_PX) / (canvas.clientWidth - LEFT_PX)) * schedule.wholeS;
  return schedule.passes.find((pass) => pass.device === device && pass.fromS <= atS && atS < pass.toS);
}

function draw(canvas, schedule, { devices, interleave }) {
  const width = canvas.clientWidth;
  const height = devices * ROW_PX + AXIS_PX;
  if (!width) return;
  const ratio = devicePixelRatio || 1;
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const scale = (width - LEFT_PX) / schedule.wholeS;
  const colours = palette(interleave);
  for (let device = 0; device < devices; device += 1) {
    const top = device * ROW_PX;
    pen.fillStyle = colours.text;
    pen.textAlign = "left";
    pen.fillText(`Stage ${device + 1}`, 0, top + ROW_PX / 2);
    pen.fillStyle = colours.idle;
    pen.fillRect(LEFT_PX, top + 3, width - LEFT_PX, ROW_PX - 6);
    const { fromS, toS } = schedule.ends[device];
    pen.fillStyle = colours.rest;
    pen.fillRect(LEFT_PX + fromS * scale, top + 3, Math.max(0.5, (toS - fromS) * scale), ROW_PX - 6);
  }
  pen.textAlign = "center";
  for (const pass of schedule.passes) drawPass(pen, pass, scale, colours);
  drawAxis(pen, { schedule, scale, top: devices * ROW_PX, colours });
}

function drawPass(pen, pass, scale, colours) {
  const left = LEFT_PX + pass.fromS * scale;
  const wide = (pass.toS - pass.fromS) * scale;
  const top = pass.device * ROW_PX + 3;
  pen.fillStyle = colours[pass.kind][pass.chunk % CHUNK_TINTS];
  pen.fillRect(left, top, Math.max(0.5, wide - (wide > 3 ? 1 : 0)), ROW_PX - 6);
  if (wide < NUMBER_PX) return;
  pen.fillStyle = colours.onPass;
  pen.fillText(String(pass.micro + 1), left + wide / 2, top + (ROW_PX - 6) / 2 + 0.5);
}

function drawAxis(pen, { schedule, scale, top, colours }) {
  pen.fillStyle = colours.muted;
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    pen.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
    pen.fillText(duration(share * schedule.wholeS), LEFT_PX + share * schedule.wholeS * scale, top + AXIS_PX / 2 + 2);
  }
}

/** Colours by name. Chunks of a device get different tints. */
function palette(interleave) {
  const tints = Math.min(interleave, CHUNK_TINTS);
  const tinted = (name) => Array.from({ length: CHUNK_TINTS }, (_, at) => {
    return mix(colour(name), colour("surface"), tints > 1 ? (0.5 * (at % tints)) / tints : 0);
  });
  return {
    forward: tinted("training"),
    backward: tinted("inference"),
    rest: colour("down"),
    idle: colour("idle"),
    text: colour("text"),
    muted: colour("muted"),
    onPass: colour("surface"),
  };
}

/** Mixes two colours of the form #rrggbb. */
function mix(one, other, share) {
  const parts = (text) => [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16));
  const theirs = parts(other);
  const mixed = parts(one).map((part, at) => Math.round(part * (1 - share) + theirs[at] * share));
  return `rgb(${mixed.join(" ")})`;
}
