// Draws lanes of the Gantt chart as SVG: boxes of jobs, marks at their ends, and a band for the loan of the node.

import { el, svg } from "./dom.js";
import { duration, plural, timeToMinute } from "./format.js";
import { lookOf } from "./gantt_layout.js";

const HEIGHT_PX = 24; // of the boxes of a lane; gantt.css has the height of the whole lane
const LABEL_PX_MIN = 44;
const CHARACTER_PX = 6.6;
const ENDS = {
  resized: "resized",
  recalled: "recalled by inference",
  preempted: "preempted",
  suspended: "suspended",
  node_down: "node went down",
  failed: "run failed",
  succeeded: "job succeeded",
  cancelled: "job cancelled",
};
/** Marks at the end of a box: [SVG path around x = 0, class]. Jobs that ended by themselves have none. */
const MARKS = {
  resized: ["M0 0V24", "resized"],
  recalled: ["M0 0V24M0 4L-9 0V8Z", "recalled"],
  preempted: ["M0 0V24M-4 2V10M-7 2V10", "preempted"],
  suspended: ["M0 0V24M-4 2V10M-7 2V10", "preempted"],
  node_down: ["M-9 2L-2 9M-2 2L-9 9", "failed"],
  failed: ["M-9 2L-2 9M-2 2L-9 9", "failed"],
};

export const endWords = (end) => (end === null ? "still held" : ENDS[end] ?? end);

/** The patterns that boxes refer to. Every chart needs them once. */
export function patterns() {
  const pattern = (name, ...shapes) => {
    const size = { width: 8, height: 8, patternUnits: "userSpaceOnUse" };
    return svg("pattern", { id: `gantt-pattern-${name}`, ...size }, shapes);
  };
  const stripes = pattern(1, svg("path", { d: "M-2 2L2 -2M0 8L8 0M6 10L10 6", class: "gantt-ink" }));
  const dots = pattern(2, svg("circle", { cx: 4, cy: 4, r: 1.5, class: "gantt-dot" }));
  return svg("svg", { class: "unseen", "aria-hidden": "true" }, svg("defs", {}, stripes, dots));
}

/**
 * Draws one lane. `widthPx` is the width of the track, for labels that fit.
 * @param {import("./gantt_layout.js").Lane} lane
 * @param {number} widthPx
 */
export function drawLane(lane, widthPx) {
  const { node, boxes, loans } = lane;
  const name = el("a", { href: `#/nodes/${encodeURIComponent(node.name)}`, title: `${node.name}, ${node.pool}` });
  name.append(node.name);
  const drawn = [
    ...boxes.map((box) => drawBox(box, widthPx)),
    ...boxes.flatMap(drawMark),
    ...loans.map(drawLoan),
  ];
  const track = svg("svg", { class: "gantt-track", "aria-hidden": "true", focusable: "false" }, drawn);
  return el("div", { class: "gantt-lane" }, name, track);
}

function drawBox({ span, from, to, top, height }, widthPx) {
  const isHidden = span.name === null;
  const [colour, pattern] = lookOf(span.job_id);
  const at = { x: share(from), width: share(Math.max(to - from, 0.0012)), y: top * HEIGHT_PX };
  const size = { ...at, height: Math.max(2, height * HEIGHT_PX - 1), rx: 2 };
  const shapes = [svg("rect", { ...size, class: isHidden ? "gantt-box hidden-job" : `gantt-box hue-${colour}` })];
  if (pattern && !isHidden) shapes.push(svg("rect", { ...size, fill: `url(#gantt-pattern-${pattern})` }));
  const label = labelOf(span, (to - from) * widthPx, height * HEIGHT_PX);
  if (label) {
    const middle = (top + height / 2) * HEIGHT_PX;
    shapes.push(svg("text", { x: share(from), dx: 5, y: middle, dy: "0.34em", class: "gantt-label" }, label));
  }
  shapes.push(svg("title", {}, describe(span)));
  if (isHidden) return svg("g", {}, shapes);
  return svg("a", { href: `#/jobs/${encodeURIComponent(span.job_id)}`, tabindex: -1 }, shapes);
}

/** Returns the name of the job, shortened to the box; nothing if the box is too small. */
function labelOf(span, widthPx, heightPx) {
  if (span.name === null || widthPx < LABEL_PX_MIN || heightPx < 11) return "";
  const fits = Math.floor((widthPx - 10) / CHARACTER_PX);
  return span.name.length <= fits ? span.name : `${span.name.slice(0, Math.max(1, fits - 1))}…`;
}

function drawMark({ span, to }) {
  const mark = span.end_s !== null && to < 1 && MARKS[span.end];
  if (!mark) return [];
  return [svg("svg", { x: share(to), class: `gantt-mark ${mark[1]}` }, svg("path", { d: mark[0] }))];
}

function drawLoan({ kind, from, to, loan }) {
  const size = { x: share(from), width: share(Math.max(to - from, 0.0012)), y: HEIGHT_PX + 2, height: 4, rx: 2 };
  return svg("rect", { ...size, class: `gantt-loan ${kind}` }, svg("title", {}, `Loan of ${loan.node}: ${kind}`));
}

function share(value) {
  return `${(100 * value).toFixed(3)}%`;
}

export function describe(span) {
  const until = span.end_s === null ? "now" : timeToMinute(span.end_s);
  const seconds = (span.end_s ?? Date.now() / 1000) - span.begin_s;
  const who = span.name === null ? "A job of another queue" : `${span.name} (${span.queue})`;
  const held = `${plural(span.gpus.length, "GPU")} of ${span.node}`;
  const times = `${timeToMinute(span.begin_s)} to ${until}, ${duration(Math.round(seconds))}`;
  return `${who}: ${held}, ${times}, ${endWords(span.end)}`;
}

/** The explanation of the signs. */
export function legend() {
  const mark = (name) => svg("svg", { class: `gantt-key gantt-mark ${MARKS[name][1]}`, viewBox: "-12 -1 14 26" },
    svg("path", { d: MARKS[name][0] }));
  const band = (kind) => el("span", { class: `gantt-swatch ${kind}` });
  const entries = [
    [mark("resized"), "resized"],
    [mark("recalled"), "recalled"],
    [mark("preempted"), "preempted or suspended"],
    [mark("failed"), "failed, or node down"],
    [band("lent"), "node on loan"],
    [band("recalled"), "being recalled"],
    [band("other"), "job of another queue"],
  ];
  return el("ul", { class: "legend gantt-legend" }, entries.map(([sign, name]) => el("li", {}, sign, name)));
}

/** A swatch with the colour and the pattern of a job. */
export function jobSwatch(jobId, isHidden) {
  const [colour, pattern] = lookOf(jobId);
  const size = { width: 18, height: 12, rx: 2 };
  const look = isHidden ? "hidden-job" : `hue-${colour}`;
  const fill = pattern && !isHidden && svg("rect", { ...size, fill: `url(#gantt-pattern-${pattern})` });
  const props = { class: "gantt-job-swatch", width: 18, height: 12, "aria-hidden": "true" };
  return svg("svg", props, svg("rect", { ...size, class: `gantt-box ${look}` }), fill);
}
