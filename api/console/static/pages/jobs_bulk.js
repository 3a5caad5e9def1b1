// Actions on several jobs: one confirmation that lists them, and one report of each failure.

import { ask } from "../api.js";
import { confirm } from "../dialogs.js";
import { el, put } from "../dom.js";
import { gpus, plural } from "../format.js";
import { noChange, whoAmI } from "../permissions.js";

const AT_ONCE = 4;
const ENDED = ["succeeded", "failed", "cancelled"];
export const COMPARED_MAX = 4;

const ACTIONS = {
  suspend: {
    verb: "Suspend",
    effect: "They save a checkpoint, release their GPUs, and wait until they are resumed.",
    done: "being suspended",
    request: (path) => ask("POST", `${path}:suspend`),
    excludes: (job) => job.intent === "suspend" && "is suspended",
  },
  cancel: {
    verb: "Cancel",
    effect: "Their workers are stopped and they cannot be resumed. Their history and checkpoints are kept.",
    done: "being cancelled",
    danger: true,
    request: (path) => ask("DELETE", path),
    excludes: () => false,
  },
};

/**
 * Buttons for the selected jobs. `result`: the place of reports; `acted` is called after an action.
 * @param {Map<string, any>} selected
 * @param {{result: HTMLElement, acted: () => void, clear: () => void}} options
 */
export function bulkBar(selected, { result, acted, clear }) {
  const jobs = [...selected.values()];
  const button = (name, click, props = {}) => el("button", { type: "button", on: { click }, ...props }, name);
  const start = (name) => () => act(ACTIONS[name], jobs, { result, acted });
  const isComparable = jobs.length >= 2 && jobs.length <= COMPARED_MAX;
  const ids = jobs.map((job) => encodeURIComponent(job.id)).join(",");
  const title = `Select 2 to ${COMPARED_MAX} jobs to compare them.`;
  const hint = isComparable ? {} : { "aria-disabled": "true", title };
  const compare = () => {
    if (isComparable) location.hash = `#/compare?jobs=${ids}`;
    else put(result, el("p", { class: "note warn", role: "alert" }, title));
  };
  return el("div", { class: "bulk", role: "group", "aria-label": "Selected jobs" },
    el("span", { role: "status" }, `${plural(jobs.length, "job")} selected`),
    button("Compare", compare, hint),
    button("Suspend selected", start("suspend")),
    button("Cancel selected", start("cancel"), { class: "danger" }),
    button("Clear selection", clear, { class: "quiet" }));
}

async function act(action, jobs, { result, acted }) {
  const who = await whoAmI();
  const left = jobs.map((job) => [job, whyNot(job, action, who)]).filter(([, why]) => why);
  const chosen = jobs.filter((job) => !left.some(([each]) => each === job));
  if (!chosen.length) return put(result, report("No job can be changed", left));
  const heading = `${action.verb} ${plural(chosen.length, "job")}?`;
  const what = [
    action.effect,
    list("Jobs to change", chosen.map(shortly)),
    left.length ? `${plural(left.length, "selected job")} ${left.length === 1 ? "stays" : "stay"} as they are:` : "",
    left.length ? list("Jobs left out", left.map(([job, why]) => `${job.name}: ${why}`)) : "",
  ].filter(Boolean);
  const yes = `${action.verb} ${plural(chosen.length, "job")}`;
  if (!(await confirm(heading, what, { action: yes, danger: action.danger }))) return undefined;
  const failures = await requestAll(action, chosen);
  const done = chosen.length - failures.length;
  put(result, report(`${plural(done, "job")} ${done === 1 ? "is" : "are"} ${action.done}`, failures));
  return acted();
}

function shortly(job) {
  return `${job.name}, ${job.state}, ${gpus(job.gpus.target)}, queue ${job.queue}`;
}

function whyNot(job, action, who) {
  if (ENDED.includes(job.state)) return `has ended (${job.state})`;
  return action.excludes(job) || noChange(who, job);
}

/** Sends the requests, a few at a time. Returns [job, error message] of those that failed. */
async function requestAll(action, jobs) {
  const waiting = [...jobs];
  const failures = [];
  const work = async () => {
    for (let job = waiting.shift(); job; job = waiting.shift()) {
      await action.request(`/v1/jobs/${encodeURIComponent(job.id)}`).catch((error) => {
        failures.push([job, error.message]);
      });
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return failures;
}

function list(label, lines) {
  return el("ul", { class: "chosen", tabindex: "0", "aria-label": label }, lines.map((line) => el("li", {}, line)));
}

function report(title, failures) {
  const lines = failures.map(([job, why]) => el("li", {}, el("a", { href: `#/jobs/${job.id}` }, job.name), `: ${why}`));
  const kind = failures.length ? "note warn" : "note";
  const more = failures.length ? `. ${plural(failures.length, "job")} not changed:` : ".";
  return el("div", { class: kind, role: "status" }, `${title}${more}`, failures.length ? el("ul", {}, lines) : null);
}
