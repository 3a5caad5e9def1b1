// Action buttons: confirm an action, perform it, and show the service's errors.

import { ask } from "./api.js";
import { confirm, problemNote, toast } from "./dialogs.js";
import { el, put } from "./dom.js";
import { gpus, plural } from "./format.js";
import { editLabels } from "./label_chips.js";

/**
 * A button that confirms and performs an action. `action`: {name, title, what, path, method, body, done, danger,
 * disabledReason}. A disabled action shows `disabledReason` on hover and on press. `open` replaces the confirmation.
 */
export function actionButton(action, { refused, acted }) {
  const press = async () => {
    const { disabledReason } = action;
    if (disabledReason) return put(refused, el("p", { class: "note warn", role: "alert" }, disabledReason));
    if (action.open) return action.open({ refused, acted });
    if (!(await confirm(action.title, action.what, { action: action.name, danger: action.danger }))) return undefined;
    return act({ ...action, method: action.method || "POST" }, { refused, acted });
  };
  const disabledProps = action.disabledReason ? { "aria-disabled": "true", title: action.disabledReason } : {};
  const kind = action.danger ? "danger" : null;
  return el("button", { type: "button", class: kind, ...disabledProps, on: { click: press } }, action.name);
}

/** Performs a confirmed action and shows its outcome. */
export async function act({ method, path, body, done }, { refused, acted }) {
  try {
    await ask(method, path, { body });
    put(refused);
    toast(done);
    acted();
  } catch (error) {
    put(refused, problemNote(error));
  }
}

/** Returns the lending actions for the current switches and loans. `disabledReason`: why this user may not use them. */
export function lendingActions({ switches, loans, lentGpus, disabledReason }) {
  const number = Object.values(loans).reduce((sum, each) => sum + each, 0);
  const live = plural(number, "loan");
  const pause = {
    name: "Pause lending",
    title: "Pause lending?",
    what: [
      "No new loans are made until lending is resumed.",
      number ? `${live} ${number === 1 ? "continues" : "continue"}.` : "No node is lent now.",
    ],
    path: "/v1/lending:pause",
    done: "Lending is paused.",
  };
  const resume = {
    name: "Resume lending",
    title: "Resume lending?",
    what: ["The scheduler lends idle inference nodes to training again, from its next full pass."],
    path: "/v1/lending:resume",
    done: "Lending is resumed.",
  };
  const recall = {
    name: "Recall all",
    title: "Recall all loans?",
    what: [
      number ? `${live} with ${gpus(lentGpus)} ${number === 1 ? "is" : "are"} recalled.` : "No node is lent now.",
      number ? "Jobs on these nodes save and then shrink, move or stop. Nodes return by their pool's deadline." : null,
      "No new loans are made until lending is resumed.",
    ].filter(Boolean),
    path: "/v1/lending:recall-all",
    done: "All loans are being recalled.",
    danger: true,
  };
  const stopped = switches.lending_paused || switches.loans_recalled;
  const actions = [stopped ? resume : pause, !switches.loans_recalled && recall];
  return actions.filter(Boolean).map((action) => ({ ...action, disabledReason }));
}

/** Returns the actions for a job in its current state. `disabledReason`: why this user may not use them. */
export function jobActions(job, disabledReason) {
  const path = `/v1/jobs/${encodeURIComponent(job.id)}`;
  if (["succeeded", "failed", "cancelled"].includes(job.state)) return [];
  const leaves = `It releases ${gpus(job.gpus.target)} after a checkpoint.`;
  const held = job.gpus.target ? leaves : "It holds no GPUs.";
  const suspend = {
    name: "Suspend",
    title: `Suspend ${job.name}?`,
    what: [`${held} When resumed, it continues from its last checkpoint.`],
    path: `${path}:suspend`,
    done: `${job.name} is being suspended.`,
  };
  const resume = {
    name: "Resume",
    title: `Resume ${job.name}?`,
    what: ["It is queued again and continues from its last checkpoint."],
    path: `${path}:resume`,
    done: `${job.name} is queued.`,
  };
  const cancel = {
    name: "Cancel job",
    title: `Cancel ${job.name}?`,
    what: ["Its workers are stopped and it cannot be resumed. Its history and checkpoints are kept."],
    path,
    method: "DELETE",
    done: `${job.name} is being cancelled.`,
    danger: true,
  };
  const scaling = { name: "Scale", open: (options) => scale(job, options) };
  const save = {
    name: "Checkpoint",
    title: `Checkpoint ${job.name} now?`,
    what: ["Its workers save their state at the next step and continue."],
    path: `${path}:checkpoint`,
    done: `${job.name} saves at its next step.`,
  };
  const labels = { name: "Labels", open: (options) => editLabels(job, options) };
  const intent = job.intent === "suspend" ? resume : suspend;
  const actions = [scaling, job.state === "running" && save, intent, labels, cancel];
  return actions.filter(Boolean).map((action) => ({ ...action, disabledReason }));
}

/** Asks for a new GPU range and applies it. */
async function scale(job, { refused, acted }) {
  const range = {};
  const field = (name, label) => {
    range[name] = el("input", { id: `scale-${name}`, type: "number", min: 1, step: 1, value: job.gpus[name] });
    return el("div", { class: "field" }, el("label", { for: `scale-${name}` }, label), range[name]);
  };
  const what = [
    `Its current range is ${job.gpus.min} to ${gpus(job.gpus.max)}; it holds ${gpus(job.gpus.target)}.`,
    "If its GPUs are outside the new range, the next tick resizes it. A job that is not resizable keeps its GPUs.",
    el("div", { class: "form" }, field("min", "Minimum"), field("max", "Maximum")),
  ];
  if (!(await confirm(`Scale ${job.name}?`, what, { action: "Scale" }))) return;
  const body = { gpus: { min: Number(range.min.value), max: Number(range.max.value) } };
  const done = `${job.name} now has the range ${body.gpus.min} to ${gpus(body.gpus.max)}.`;
  await act({ method: "PATCH", path: `/v1/jobs/${encodeURIComponent(job.id)}`, body, done }, { refused, acted });
}
