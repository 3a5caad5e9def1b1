// Submit a job: the fields that most jobs need, or the whole document; tried before it is sent.

import { ask, post } from "../api.js";
import { forShells, Unclosed, words } from "../argv.js";
import { confirmed, toast } from "../dialogs.js";
import { card, el, facts, put } from "../dom.js";
import { clearRefusals, field, nameLists, showRefusals, values } from "../forms.js";
import { gpus, plural } from "../format.js";
import { due } from "../times.js";

const PLANNED = "With a model, the solver plans how it is spread over any number of GPUs.";
const ELASTIC = "More than the least makes it elastic.";
const QUOTING = "Words with spaces in them stand in quotes, as in a shell; but no shell reads it.";
const MORE = 'Such as {"env": {"LEVEL": "3"}}; it goes over the fields above.';

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
    if (event.target.dataset.act !== "try") return;
    attempt(async (job) => put(trial, foreseen(await post("/v1/jobs:dry-run", job))));
  });
  form.elements.command.addEventListener("input", () => showArgv(form));
  const head = el("div", { class: "head" }, el("h1", {}, "Submit a job"));
  put(root, head, el("div", { class: "stack" }, refused, form, trial));
}

async function fields() {
  const lists = await nameLists();
  const job = card("Job", el("div", { class: "form" },
    field("name", "Name", { hint: "Small letters, digits and dashes; its id begins so.", required: true }),
    field("queue", "Queue", { value: "default" }),
    field("priority", "Priority", { kind: "number", value: 0, hint: "Higher goes first within its queue." }),
    field("gpus.min", "GPUs, at least", { kind: "number", value: 1, min: 1 }),
    field("gpus.max", "GPUs, at most", { kind: "number", value: 8, min: 1, hint: ELASTIC }),
    field("gpu", "GPU model", { list: "gpu-models", hint: "Empty: any." }),
    field("steps", "Steps", { kind: "number", hint: "Empty: the length is unknown." })));
  const model = card("Model", el("p", { class: "muted small" }, PLANNED), el("div", { class: "form" },
    field("model", "Model", { list: "models", hint: "Empty: data parallel alone." }),
    field("globalBatch", "Global batch", { kind: "number", hint: "Needed with a model." }),
    field("sequenceLength", "Sequence length", { kind: "number", hint: "Empty: the model's own." })));
  const run = card("What it runs", el("div", { class: "form" },
    field("command", "Command", { wide: true, hint: QUOTING, class: "mono", spellcheck: "false" }),
    el("p", { id: "argv", class: "argv wide", hidden: true }),
    field("image", "Image", { hint: "On Kubernetes." }),
    field("checkpoint.interval", "Checkpoint every", { hint: "Such as 10m; empty: the default." }),
    field("maxRunTime", "Longest run time", { hint: "Such as 12h; empty: none." }),
    field("more", "More of the job document, as JSON", { kind: "area", wide: true, hint: MORE })));
  return [lists, job, model, run];
}

function buttons() {
  const submit = el("button", { class: "first", type: "submit" }, "Submit");
  return el("div", { class: "row" }, submit, el("button", { type: "button", data: { act: "try" } }, "Try it first"));
}

/** The words that the command is, each in a box of its own, as they will be started. */
function showArgv(form) {
  const place = document.getElementById("argv");
  const text = form.elements.command.value;
  place.hidden = !text.trim();
  try {
    const argv = words(text);
    const strange = forShells(argv);
    const none = `No shell reads it: ${strange.join(" ")} will be handed over as it stands. Use: sh -c '…'`;
    const told = `${plural(argv.length, "word")}: `;
    put(place, told, argv.map((word) => [el("code", {}, word), " "]), strange.length > 0 && el("strong", {}, none));
  } catch (error) {
    put(place, error.message);
  }
}

/** The job document that the form stands for. Raises an error with the refused field where one cannot be read. */
function documentOf(form) {
  const { more = "{}", command = "", ...plain } = values(form);
  const job = {};
  for (const [path, value] of Object.entries(plain)) {
    const [name, part] = path.split(".");
    if (part) job[name] = { ...job[name], [part]: value };
    else job[name] = value;
  }
  if (command) job.command = read("command", command, words, (why) => `words with quotes that are closed; ${why}`);
  return { ...job, ...read("more", more, JSON.parse, (why) => `valid JSON (${why})`) };
}

function read(name, value, reading, allowed) {
  try {
    return reading(value);
  } catch (error) {
    if (!(error instanceof Unclosed || error instanceof SyntaxError)) throw error;
    throw Object.assign(error, { errors: [{ field: name, value, allowed: allowed(error.message) }] });
  }
}

async function submit(job, key) {
  const { min, max } = job.gpus ?? {};
  const wanted = min === max ? gpus(min) : `${min} to ${gpus(max)}`;
  const runs = job.command?.length ? el("pre", {}, JSON.stringify(job.command)) : "It runs no command of its own.";
  const told = `It queues in ${job.queue ?? "default"} for ${wanted}, is planned, and starts when there is room.`;
  const what = [told, runs];
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
    ["Expected start", start && due(start)],
    ["Why", told.reason?.detail ?? told.explanation?.summary],
    ["Others", others.join(", ") || "nobody else is touched"],
  ]));
}
