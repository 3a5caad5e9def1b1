// Submit a job: the fields that most jobs need, or the whole document; tried before it is sent.

import { ask, post } from "../api.js";
import { confirmed, toast } from "../dialogs.js";
import { card, el, facts, put } from "../dom.js";
import { clearRefusals, field, nameLists, showRefusals, values } from "../forms.js";
import { ago, gpus, plural, time } from "../format.js";

export const title = () => "Submit a job";

export async function show(root) {
  const refused = el("div", {});
  const trial = el("div", {});
  const key = crypto.randomUUID?.() ?? String(Math.random());
  const form = el("form", { class: "stack", novalidate: true }, await fields(), buttons());
  const attempt = async (act) => {
    clearRefusals(form, refused);
    try {
      await act(documentOf(form));
    } catch (error) {
      showRefusals(form, refused, error);
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt((job) => submit(job, key));
  });
  form.addEventListener("click", (event) => {
    if (event.target.dataset.act === "try") attempt(async (job) => put(trial, foreseen(await post("/v1/jobs:dry-run", job))));
  });
  put(root, el("div", { class: "head" }, el("h1", {}, "Submit a job")), el("div", { class: "stack" }, refused, form, trial));
}

async function fields() {
  const lists = await nameLists();
  const job = card("Job", el("div", { class: "form" },
    field("name", "Name", { hint: "Small letters, digits and dashes; its id begins so.", required: true }),
    field("queue", "Queue", { value: "default" }),
    field("priority", "Priority", { kind: "number", value: 0, hint: "Higher goes first within its queue." }),
    field("gpus.min", "GPUs, at least", { kind: "number", value: 1, min: 1 }),
    field("gpus.max", "GPUs, at most", { kind: "number", value: 8, min: 1, hint: "More than the least makes it elastic." }),
    field("gpu", "GPU model", { list: "gpu-models", hint: "Empty: any." }),
    field("steps", "Steps", { kind: "number", hint: "Empty: the length is unknown." })));
  const model = card("Model", el("p", { class: "muted small" }, "With a model, the solver plans tensor, pipeline, sequence and data parallelism for every number of GPUs."), el("div", { class: "form" },
    field("model", "Model", { list: "models", hint: "Empty: data parallel alone." }),
    field("globalBatch", "Global batch", { kind: "number", hint: "Needed with a model." }),
    field("sequenceLength", "Sequence length", { kind: "number", hint: "Empty: the model's own." })));
  const run = card("What it runs", el("div", { class: "form" },
    field("command", "Command", { wide: true, hint: "Split at spaces; quote with the whole document below." }),
    field("image", "Image", { hint: "On Kubernetes." }),
    field("checkpoint.interval", "Checkpoint every", { hint: "Such as 10m; empty: the default." }),
    field("maxRunTime", "Longest run time", { hint: "Such as 12h; empty: none." }),
    field("more", "More of the job document, as JSON", { kind: "area", wide: true, hint: 'Such as {"env": {"LEVEL": "3"}}; it goes over the fields above.' })));
  return [lists, job, model, run];
}

function buttons() {
  return el("div", { class: "row" }, el("button", { class: "first", type: "submit" }, "Submit"), el("button", { type: "button", data: { act: "try" } }, "Try it first"));
}

/** The job document that the form stands for. Raises an error with the refused field where its JSON cannot be read. */
function documentOf(form) {
  const { more = "{}", command = "", ...plain } = values(form);
  const job = {};
  for (const [path, value] of Object.entries(plain)) {
    const [name, part] = path.split(".");
    if (part) job[name] = { ...job[name], [part]: value };
    else job[name] = value;
  }
  if (command) job.command = command.split(/\s+/);
  try {
    return { ...job, ...JSON.parse(more) };
  } catch (error) {
    throw Object.assign(error, { errors: [{ field: "more", value: more, allowed: `valid JSON (${error.message})` }] });
  }
}

async function submit(job, key) {
  const range = job.gpus?.min === job.gpus?.max ? gpus(job.gpus?.min) : `${job.gpus?.min} to ${gpus(job.gpus?.max)}`;
  const what = [`It queues in ${job.queue ?? "default"} for ${range}, is planned, and starts when there is room.`];
  if (!(await confirmed(`Submit ${job.name ?? "this job"}?`, what, { action: "Submit it" }))) return;
  const made = await ask("POST", "/v1/jobs", { body: job, headers: { "Idempotency-Key": key } });
  toast(`${made.name} is submitted.`);
  location.hash = `#/jobs/${made.id}`;
}

/** What the next tick would do because of the job. */
function foreseen(told) {
  const start = told.expected_start_s;
  const others = [
    told.preempted.length && `${plural(told.preempted.length, "job")} would be preempted`,
    told.resized.length && `${plural(told.resized.length, "job")} would be resized`,
    told.lent.length && `${plural(told.lent.length, "inference node")} would be offered`,
  ].filter(Boolean);
  return card("What would happen", facts([
    ["State", told.state],
    ["Plan", told.plan_summary],
    ["Place in the queue", told.position],
    ["Expected start", start && `${time(start)} (${ago(start, Date.now() / 1000)})`],
    ["Why", told.reason?.detail ?? told.explanation?.summary],
    ["Others", others.join(", ") || "nobody else is touched"],
  ]));
}
