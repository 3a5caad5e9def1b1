// Levers: what changes the world asks first, saying what will happen, and shows what the service refuses.

import { ask } from "./api.js";
import { confirmed, problemNote, toast } from "./dialogs.js";
import { el, put } from "./dom.js";
import { gpus, plural } from "./format.js";

/** A button that asks, acts and tells. `lever`: {name, title, what, path, method, body, done, danger}. */
export function leverButton(lever, { refused, acted }) {
  const press = async () => {
    if (!(await confirmed(lever.title, lever.what, { action: lever.name, danger: lever.danger }))) return;
    try {
      await ask(lever.method || "POST", lever.path, { body: lever.body, headers: lever.headers });
      put(refused);
      toast(lever.done);
      acted();
    } catch (error) {
      put(refused, problemNote(error));
    }
  };
  return el("button", { type: "button", class: lever.danger ? "danger" : null, on: { click: press } }, lever.name);
}

/** Which levers of lending there are now, by what is switched and lent. */
export function lendingLevers({ switches, loans, lentGpus }) {
  const live = plural(Object.values(loans).reduce((sum, each) => sum + each, 0), "loan");
  const pause = {
    name: "Pause lending",
    title: "Pause lending?",
    what: [`No new loans are made until lending is resumed. The ${live} that there are go on.`],
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
      `${live} with ${gpus(lentGpus)} are called home. Jobs on them save, and shrink, move or stop; each node is back by its pool's return deadline.`,
      "Nothing is lent until lending is resumed.",
    ],
    path: "/v1/lending:recall-all",
    done: "Every loan is being recalled.",
    danger: true,
  };
  const stopped = switches.lending_paused || switches.loans_recalled;
  return [stopped ? resume : pause, ...(switches.loans_recalled ? [] : [recall])];
}

/** What can be done with a job in its present state. */
export function jobLevers(job) {
  const path = `/v1/jobs/${encodeURIComponent(job.id)}`;
  if (["succeeded", "failed", "cancelled"].includes(job.state)) return [];
  const held = job.gpus.target ? `Its ${gpus(job.gpus.target)} are given back after a checkpoint.` : "It holds no GPUs.";
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
  return [job.intent === "suspend" ? resume : suspend, cancel];
}

/** Asks for another range of GPUs, and then to confirm it. */
export async function scale(job, { refused, acted }) {
  const range = {};
  const field = (name, label) => {
    range[name] = el("input", { id: `scale-${name}`, type: "number", min: 1, step: 1, value: job.gpus[name] });
    return el("div", { class: "field" }, el("label", { for: `scale-${name}` }, label), range[name]);
  };
  const what = [
    `It may hold ${job.gpus.min} to ${gpus(job.gpus.max)} now, and holds ${gpus(job.gpus.target)}. Where that no longer fits, the next tick resizes it after a checkpoint.`,
    el("div", { class: "form" }, field("min", "At least"), field("max", "At most")),
  ];
  if (!(await confirmed(`Scale ${job.name}?`, what, { action: "Scale" }))) return;
  const body = { gpus: { min: Number(range.min.value), max: Number(range.max.value) } };
  try {
    await ask("PATCH", `/v1/jobs/${encodeURIComponent(job.id)}`, { body });
    put(refused);
    toast(`${job.name} may hold ${body.gpus.min} to ${gpus(body.gpus.max)}.`);
    acted();
  } catch (error) {
    put(refused, problemNote(error));
  }
}
