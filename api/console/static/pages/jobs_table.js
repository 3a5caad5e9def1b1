// Table of jobs: columns, order by column, and check boxes that select jobs.

import { badge, bar, el, table } from "../dom.js";
import { duration, figure, percent, plural, range, time } from "../format.js";
import { addressOf, nextSort } from "../job_query.js";
import { labelChips } from "../label_chips.js";
import { age } from "../times.js";

const HOUR_S = 3600;
const CHIPS_MAX = 2;
/** Columns: [heading, is a number, name of its order, whether the first press sorts in descending order]. */
const COLUMNS = [
  ["Job", false, "name", false],
  ["State", false, "state", false],
  ["Reason", false, null, false],
  ["Queue", false, "queue", false],
  ["GPUs", true, "gpus", true],
  ["Progress", false, "progress", true],
  ["Time left", true, "remaining", false],
  ["GPU-hours", true, "gpu_time", true],
  ["Submitted", true, "submitted", true],
];

let pressed = null; // column of the heading that was pressed last

/**
 * `selected`: the selected jobs by ID; `changed` is called after each change of it.
 * @param {any[]} jobs
 * @param {{wanted: Record<string, string>, selected: Map<string, any>, changed: () => void}} options
 */
export function jobTable(jobs, { wanted, selected, changed }) {
  const columns = COLUMNS.map(([name, isNumber, column, down]) => [
    column ? heading(name, column, down, wanted) : name,
    isNumber,
  ]);
  const named = (job) => [nameCell(job, selected, changed), labelChips(job.labels, { wanted, shownMax: CHIPS_MAX })];
  const shown = table("Jobs", columns, jobs.map((job) => row(job, named(job))));
  const heads = shown.querySelectorAll("thead th");
  COLUMNS.forEach(([, , column], at) => {
    const direction = wanted.sort === column ? "ascending" : wanted.sort === `-${column}` ? "descending" : null;
    if (column && direction) heads[at].setAttribute("aria-sort", direction);
  });
  shown.classList.add("jobs");
  return shown;
}

/** Returns the keyboard focus to the heading that was pressed, once its table is drawn. */
export function focusPressed(place) {
  if (pressed) place.querySelector(`#sort-${pressed}`)?.focus({ preventScroll: true });
  pressed = null;
}

function heading(name, column, down, wanted) {
  const href = addressOf({ ...wanted, sort: nextSort(wanted.sort, column, down) });
  const click = () => {
    pressed = column;
  };
  return el("a", { href, id: `sort-${column}`, class: "sort", on: { click } }, name);
}

function row(job, named) {
  const { progress } = job;
  const held = job.gpus.target || job.gpus.releasing;
  return [
    named,
    badge(job.state),
    reasonCell(job),
    job.queue,
    held ? `${job.gpus.target} of ${job.gpus.max}` : range(job.gpus.min, job.gpus.max),
    progress.estimate ? estimatedDone(progress.estimate) : reportedDone(progress),
    timeLeft(progress),
    job.account.gpu_s ? figure(job.account.gpu_s / HOUR_S) : "–",
    age(job.submitted_at_s),
  ];
}

function nameCell(job, selected, changed) {
  const choose = ({ currentTarget: box }) => {
    if (box.checked) selected.set(job.id, job);
    else selected.delete(job.id);
    changed();
  };
  const label = `Select ${job.name}`;
  const checked = selected.has(job.id);
  if (checked) selected.set(job.id, job); // the newest state
  const box = el("input", { type: "checkbox", "aria-label": label, checked, on: { change: choose } });
  return el("span", { class: "pick" }, box, el("a", { href: `#/jobs/${job.id}`, title: job.id }, job.name));
}

/** Shows why a pending job waits, or why another job is in its state. A failure's log lines are on its page. */
function reasonCell(job) {
  const text = (job.pending_reason?.detail ?? job.message).split(" | ")[0];
  const asOf = job.pending_reason ? `\nAs of ${time(job.pending_reason_at_s)}` : "";
  return text ? el("span", { class: "small muted message", title: `${text}${asOf}` }, text) : "";
}

function reportedDone({ fraction, steps }) {
  return fraction === null ? plural(Math.floor(steps), "step") : done(fraction);
}

/** Formats the progress of a job that has never reported: no bar, and marked as an estimate. */
function estimatedDone({ fraction }) {
  const label = fraction === null ? "not reported" : `estimated ${percent(fraction)}`;
  return el("span", { class: "small muted", title: "The job has not reported progress." }, label);
}

function timeLeft({ remaining_s: leftS, estimate }) {
  if (estimate && estimate.remaining_s !== null) return `estimated ${duration(estimate.remaining_s)}`;
  return leftS === null ? "–" : duration(leftS);
}

function done(fraction) {
  const label = `${percent(fraction)} done`;
  const drawn = bar(label, [["training", fraction]]);
  return el("div", { class: "done", title: label }, drawn, el("span", { class: "small" }, percent(fraction)));
}
