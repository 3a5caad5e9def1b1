// Submit page: a form for common fields, JSON for the rest of the job document, and a dry run with
// the estimated start, the plan, and the scaling curve.

import { ask, post } from "../api.js";
import { forShells, Unclosed, words } from "../argv.js";
import { confirm, toast } from "../dialogs.js";
import { card, el, facts, put } from "../dom.js";
import { clearRefusals, field, nameLists, showRefusals, values } from "../forms.js";
import { gpus, plural } from "../format.js";
import { LABELS_FORM } from "../label_chips.js";
import { atLabelsField, parseLabels } from "../label_text.js";
import { due } from "../times.js";
import { submitPreview } from "./submit_preview.js";

const PLANNED = "With a model, the solver finds a parallel plan for any number of GPUs.";
const ELASTIC = "A maximum above the minimum makes the job elastic.";
const QUOTING = "Required, unless the image has one. Quote words that contain spaces. It runs without a shell.";
const ON_RESIZE = "Jobs that are not resizable keep their GPUs and do not run on lent nodes.";
const RESIZE_MODES = [
  ["", "Default: by what the job reports"],
  ["checkpoint", "Save and resume"],
  ["restart", "Start again"],
  ["never", "Never resize"],
];
const MORE = 'For example {"env": {"LEVEL": "3"}}. Overrides the fields above.';

export const title = () => "Submit a job";

export async function show(root, { signal }) {
  const refused = el("div", {});
  const trial = el("div", { class: "stack" });
  let previewing = new AbortController();
  signal.addEventListener("abort", () => previewing.abort());
  const key = crypto.randomUUID?.() ?? String(Math.random());
  const form = el("form", { class: "stack", novalidate: true }, await fields(), buttons());
  const attempt = async (act) => {
    clearRefusals(form, refused);
    try {
      await act(documentOf(form));
    } catch (error) {
      showRefusals(form, refused, Object.assign(error, { errors: atLabelsField(error.errors) }));
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt((job) => submit(job, key));
  });
  form.addEventListener("click", (event) => {
    if (event.target.dataset.act !== "try") return;
    attempt(async (job) => {
      previewing.abort();
      previewing = new AbortController();
      const mine = previewing.signal;
      const card = foreseen(await post("/v1/jobs:dry-run", job, { signal: mine }));
      const plan = el("div", { class: "stack" });
      put(trial, card, plan);
      await submitPreview(job, plan, mine);
    });
  });
  form.elements.command.addEventListener("input", () => showArgv(form));
  const head = el("div", { class: "head" }, el("h1", {}, "Submit a job"));
  put(root, head, el("div", { class: "stack" }, refused, form, trial));
}

async function fields() {
  const lists = await nameLists();
  const job = card("Job", el("div", { class: "form" },
    field("name", "Name", { hint: "Lower-case letters, digits and dashes. Prefix of the job ID.", required: true }),
    field("queue", "Queue", { value: "default" }),
    field("priority", "Priority", { kind: "number", value: 0, hint: "Higher values are scheduled first." }),
    field("gpus.min", "Minimum GPUs", { kind: "number", value: 1, min: 1 }),
    field("gpus.max", "Maximum GPUs", { kind: "number", value: 8, min: 1, hint: ELASTIC }),
    field("gpu", "GPU model", { list: "gpu-models", hint: "Default: any." }),
    field("steps", "Steps", { kind: "number", hint: "Default: unknown." }),
    field("labels", "Labels", { hint: "For example team=vision, stage=pretrain.", spellcheck: "false" })));
  const model = card("Model", el("p", { class: "muted small" }, PLANNED), el("div", { class: "form" },
    field("model", "Model", { list: "models", hint: "Default: data parallel only." }),
    field("globalBatch", "Global batch", { kind: "number", hint: "Required with a model." }),
    field("sequenceLength", "Sequence length", { kind: "number", hint: "Default: that of the model." })));
  const run = card("Workload", el("div", { class: "form" },
    field("command", "Command", { wide: true, hint: QUOTING, class: "mono", spellcheck: "false" }),
    el("p", { id: "argv", class: "argv wide", hidden: true }),
    field("image", "Image", { hint: "Kubernetes only." }),
    field("checkpoint.interval", "Checkpoint interval", { hint: "For example 10m. Default: the service's." }),
    field("onResize", "On resize", { options: RESIZE_MODES, hint: ON_RESIZE }),
    field("maxRunTime", "Maximum run time", { hint: "For example 12h. Default: none." }),
    field("more", "Other fields of the job document (JSON)", { kind: "area", wide: true, hint: MORE })));
  return [lists, job, model, run];
}

function buttons() {
  const submit = el("button", { class: "first", type: "submit" }, "Submit");
  return el("div", { class: "row" }, submit, el("button", { type: "button", data: { act: "try" } }, "Dry run"));
}

/** Shows the words of the command as they will be passed, one box each. */
function showArgv(form) {
  const place = document.getElementById("argv");
  const text = form.elements.command.value;
  place.hidden = !text.trim();
  try {
    const argv = words(text);
    const strange = forShells(argv);
    const none = `The command runs without a shell: ${strange.join(" ")} is passed literally. Use: sh -c '…'`;
    const result = `${plural(argv.length, "word")}: `;
    put(place, result, argv.map((word) => [el("code", {}, word), " "]), strange.length > 0 && el("strong", {}, none));
  } catch (error) {
    put(place, error.message);
  }
}

/** Returns the job document of the form. Throws an error that names the field if one cannot be parsed. */
function documentOf(form) {
  const { more = "{}", command = "", labels = "", ...plain } = values(form);
  const job = {};
  for (const [path, value] of Object.entries(plain)) {
    const [name, part] = path.split(".");
    if (part) job[name] = { ...job[name], [part]: value };
    else job[name] = value;
  }
  if (labels) job.labels = read("labels", labels, parseLabels, (why) => `${LABELS_FORM}; ${why}`);
  if (command) job.command = read("command", command, words, (why) => `words with closed quotes; ${why}`);
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
  const runs = job.command?.length ? el("pre", {}, JSON.stringify(job.command)) : "It has no command.";
  const result = `It is queued in ${job.queue ?? "default"} for ${wanted}, planned, and started when GPUs are free.`;
  const what = [result, runs];
  if (!(await confirm(`Submit ${job.name ?? "this job"}?`, what, { action: "Submit job" }))) return;
  const made = await ask("POST", "/v1/jobs", { body: job, headers: { "Idempotency-Key": key } });
  toast(`${made.name} submitted.`);
  location.hash = `#/jobs/${made.id}`;
}

/** Says when the job would start: at once, at an estimated time, or at an unknown one. */
function startText({ state, expected_start_s: startS }) {
  if (["starting", "running"].includes(state)) return "at the next tick";
  if (startS) return due(startS);
  if (state === "planning") return "after its plan is solved, if GPUs are free";
  return "unknown: depends on jobs without a known end";
}

/** Renders the result of a dry run: what the next tick would decide. */
function foreseen(result) {
  const others = [
    result.preempted.length && `${plural(result.preempted.length, "job")} would be preempted`,
    result.resized.length && `${plural(result.resized.length, "job")} would be resized`,
    result.lent.length && `${plural(result.lent.length, "inference node")} would be offered`,
  ].filter(Boolean);
  return card("Dry run", facts([
    ["State", result.state],
    ["Plan", result.plan_summary],
    ["Queue position", result.position],
    ["Estimated start", startText(result)],
    ["Reason", result.reason?.detail ?? result.explanation?.summary],
    ["Effect on others", others.join(", ") || "none"],
  ]));
}
