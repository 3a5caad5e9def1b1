// Jobs page: live and ended jobs, with filters and pages.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, bar, card, el, empty, put, table } from "../dom.js";
import { duration, percent, plural, range } from "../format.js";
import { keepUp } from "../live.js";
import { age } from "../times.js";

const PAGE_JOBS = 100;
const STATES = [
  ["live", "Live"],
  ["", "All"],
  ["running,starting,resizing", "Running"],
  ["queued,planning,submitted,preempted", "Pending"],
  ["suspended", "Suspended"],
  ["succeeded", "Succeeded"],
  ["failed", "Failed"],
  ["cancelled", "Cancelled"],
];

export const title = () => "Jobs";

export async function show(root, { query, signal }) {
  const usual = { state: "live", name: "", queue: "", owner: "" };
  const wanted = Object.fromEntries(Object.keys(usual).map((name) => [name, query.get(name) ?? usual[name]]));
  const cursors = [""];
  const body = el("div", { class: "stack" });
  const pager = el("nav", { class: "row", "aria-label": "Pages of jobs" });
  const list = { at: 0, next: null };
  const refresh = async () => {
    const cursor = cursors[list.at];
    const label = await get("/v1/jobs", { query: { ...wanted, limit: PAGE_JOBS, cursor }, signal });
    list.next = label.next;
    put(body, jobTable(label.items, wanted));
    turnPages(pager, list, cursors, again);
  };
  const failed = (error) => error && put(body, problemNote(error));
  const submit = el("a", { class: "button first", href: "#/submit" }, "Submit a job");
  put(
    root,
    el("div", { class: "head" }, el("h1", { class: "grow" }, "Jobs"), submit),
    el("div", { class: "stack" }, filters(wanted), body, pager),
  );
  const again = keepUp(refresh, { signal, everyS: 10, wants: (event) => event.code.startsWith("Job"), failed });
}

/** A filter changes the URL, so that it can be bookmarked and shared. */
function filters(wanted) {
  const states = STATES.some(([value]) => value === wanted.state) ? STATES : [...STATES, [wanted.state, wanted.state]];
  const options = states.map(([value, name]) => el("option", { value, selected: value === wanted.state }, name));
  const select = el("select", { id: "state", name: "state" }, options);
  const text = (name, label, placeholder) => {
    const input = el("input", { id: name, name, value: wanted[name], placeholder, autocomplete: "off" });
    return el("div", {}, el("label", { for: name }, label), input);
  };
  const apply = (event) => {
    event.preventDefault();
    const given = [...new FormData(form)].map(([name, value]) => [name, String(value)]);
    location.hash = `#/jobs?${new URLSearchParams(given)}`;
  };
  const form = el(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter jobs", on: { submit: apply } },
    el("div", {}, el("label", { for: "state" }, "State"), select),
    text("name", "Name starts with", "any"),
    text("queue", "Queue", "any"),
    text("owner", "Owner", "any"),
    el("button", { type: "submit" }, "Filter"),
  );
  select.addEventListener("change", apply);
  return form;
}

function jobTable(jobs, wanted) {
  if (!jobs.length) {
    const isFiltered = wanted.name || wanted.queue || wanted.owner || wanted.state !== "live";
    return card("No jobs", isFiltered ? noneAsked() : noneAtAll());
  }
  const where = [["Job"], ["State"], ["Queue"], ["GPUs", true]];
  const columns = [...where, ["Progress"], ["Time left", true], ["Plan"], ["Submitted", true]];
  const shown = table("Jobs", columns, jobs.map(row));
  return el("section", { class: "card", "aria-label": "Jobs" }, shown);
}

function noneAsked() {
  const all = el("a", { href: "#/jobs?state=", class: "button" }, "All jobs");
  return empty("No matching jobs", "Choose another state or clear the filters.", all);
}

function noneAtAll() {
  const command = "ebbtide submit --name hello --min 1 --max 2 --steps 1000 --command \"python train.py\"";
  const ended = el("a", { href: "#/jobs?state=" }, "Show ended jobs");
  return empty("No live jobs", "Submit a job here or from a shell:", el("pre", {}, command), ended);
}

function row(job) {
  const { progress } = job;
  const name = el("a", { href: `#/jobs/${job.id}`, title: job.id }, job.name);
  const label = job.message && el("span", { class: "small muted message", title: job.message }, job.message);
  const held = job.gpus.target || job.gpus.releasing;
  return [
    label ? [name, label] : name,
    badge(job.state),
    job.queue,
    held ? `${job.gpus.target} of ${job.gpus.max}` : range(job.gpus.min, job.gpus.max),
    progress.estimate ? estimatedDone(progress.estimate) : reportedDone(progress),
    timeLeft(progress),
    job.plan ? el("span", { class: "small muted" }, job.plan) : "–",
    age(job.submitted_at_s),
  ];
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

function turnPages(place, list, cursors, again) {
  const turn = (to) => () => {
    if (to > list.at) cursors[to] = list.next;
    list.at = to;
    scrollTo({ top: 0 });
    again();
  };
  if (!list.at && !list.next) put(place);
  else {
    put(
      place,
      el("button", { type: "button", disabled: list.at === 0, on: { click: turn(list.at - 1) } }, "Newer"),
      el("span", { class: "muted small" }, `Page ${list.at + 1}`),
      el("button", { type: "button", disabled: !list.next, on: { click: turn(list.at + 1) } }, "Older"),
    );
  }
}
