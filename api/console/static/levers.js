// Levers: what changes the world asks first, saying what will happen, and shows what the service refuses.

import { ask } from "./api.js";
import { confirmed, problemNote, toast } from "./dialogs.js";
import { el, put } from "./dom.js";
import { gpus, plural } from "./format.js";

/**
 * A button that asks, acts and tells. `lever`: {name, title, what, path, method, body, done, danger, hindered}; one
 * that is `hindered` says why when it is pressed or pointed at. A lever with `pull` asks by itself.
 */
export function leverButton(lever, { refused, acted }) {
  const press = async () => {
    if (lever.hindered) return put(refused, el("p", { class: "note warn", role: "alert" }, lever.hindered));
    if (lever.pull) return lever.pull({ refused, acted });
    if (!(await confirmed(lever.title, lever.what, { action: lever.name, danger: lever.danger }))) return undefined;
    return act({ ...lever, method: lever.method || "POST" }, { refused, acted });
  };
  const hindrance = lever.hindered ? { "aria-disabled": "true", title: lever.hindered } : {};
  const kind = lever.danger ? "danger" : null;
  return el("button", { type: "button", class: kind, ...hindrance, on: { click: press } }, lever.name);
}

async function act({ method, path, body, done }, { refused, acted }) {
  try {
    await ask(method, path, { body });
    put(refused);
    toast(done);
    acted();
  } catch (error) {
    put(refused, problemNote(error));
  }
}

/** Which levers of lending there are now, by what is switched and lent; `hindered`: why this person may pull none. */
export function lendingLevers({ switches, loans, lentGpus, hindered }) {
  const number = Object.values(loans).reduce((sum, each) => sum + each, 0);
  const live = plural(number, "loan");
  const pause = {
    name: "Pause lending",
    title: "Pause lending?",
    what: [
      "No new loans are made until lending is resumed.",
      number ? `The ${live} that there ${number === 1 ? "is goes" : "are go"} on.` : "Nothing is lent now.",
    ],
    path: "/v1/lending:pause",
    done: "Lending is paused.",
  };
  const resume = {
    name: "Resume lending",
    title: "Resume lending?",
    what: ["Idle inference nodes may be lent to training again, from the next full pass of the scheduler on."],
    path: "/v1/lending:resume",
    done: "Lending goes on.",
  };
  const recall = {
    name: "Recall all",
    title: "Recall every loan?",
    what: [
      number ? `${live} with ${gpus(lentGpus)} ${number === 1 ? "is" : "are"} called home.` : "Nothing is lent now.",
      number ? "Jobs there save, and shrink, move or stop; each node is back by its pool's return deadline." : null,
      "Nothing is lent until lending is resumed.",
    ].filter(Boolean),
    path: "/v1/lending:recall-all",
    done: "Every loan is being recalled.",
    danger: true,
  };
  const stopped = switches.lending_paused || switches.loans_recalled;
  const levers = [stopped ? resume : pause, !switches.loans_recalled && recall];
  return levers.filter(Boolean).map((lever) => ({ ...lever, hindered }));
}

/** What can be done with a job in its present state; `hindered`: why this person may do nothing with it. */
export function jobLevers(job, hindered) {
  const path = `/v1/jobs/${encodeURIComponent(job.id)}`;
  if (["succeeded", "failed", "cancelled"].includes(job.state)) return [];
  const leaves = `It gives back ${gpus(job.gpus.target)} after a checkpoint.`;
  const held = job.gpus.target ? leaves : "It holds no GPUs.";
  const suspend = {
    name: "Suspend",
    title: `Suspend ${job.name}?`,
    what: [`${held} It waits until it is resumed, and goes on from its last checkpoint.`],
    path: `${path}:suspend`,
    done: `${job.name} is being suspended.`,
  };
  const resume = {
    name: "Resume",
    title: `Resume ${job.name}?`,
    what: ["It queues again, and goes on from its last checkpoint."],
    path: `${path}:resume`,
    done: `${job.name} queues again.`,
  };
  const cancel = {
    name: "Cancel job",
    title: `Cancel ${job.name}?`,
    what: ["Its workers are stopped for good, and it cannot be resumed. Its record and its checkpoints stay."],
    path,
    method: "DELETE",
    done: `${job.name} is being cancelled.`,
    danger: true,
  };
  const scaling = { name: "Scale", pull: (options) => scale(job, options) };
  const save = {
    name: "Checkpoint",
    title: `Save ${job.name} now?`,
    what: ["Its workers save their state at the next step, and go on."],
    path: `${path}:checkpoint`,
    done: `${job.name} saves at its next step.`,
  };
  const levers = [scaling, job.state === "running" && save, job.intent === "suspend" ? resume : suspend, cancel];
  return levers.filter(Boolean).map((lever) => ({ ...lever, hindered }));
}

/** Asks for another range of GPUs, and then to confirm it. */
async function scale(job, { refused, acted }) {
  const range = {};
  const field = (name, label) => {
    range[name] = el("input", { id: `scale-${name}`, type: "number", min: 1, step: 1, value: job.gpus[name] });
    return el("div", { class: "field" }, el("label", { for: `scale-${name}` }, label), range[name]);
  };
  const what = [
    `It may hold ${job.gpus.min} to ${gpus(job.gpus.max)} now, and holds ${gpus(job.gpus.target)}.`,
    "Where that no longer fits, the next tick resizes it after a checkpoint.",
    el("div", { class: "form" }, field("min", "At least"), field("max", "At most")),
  ];
  if (!(await confirmed(`Scale ${job.name}?`, what, { action: "Scale" }))) return;
  const body = { gpus: { min: Number(range.min.value), max: Number(range.max.value) } };
  const done = `${job.name} may hold ${body.gpus.min} to ${gpus(body.gpus.max)}.`;
  await act({ method: "PATCH", path: `/v1/jobs/${encodeURIComponent(job.id)}`, body, done }, { refused, acted });
}
