// Plan explorer: the fastest plan of a model on a number of GPUs of one or several models, the next-best plans, the
// pipeline's schedule, and the scaling curve.

import { Problem } from "../api.js";
import { problemNote } from "../dialogs.js";
import { card, copyButton, el, empty, put, table } from "../dom.js";
import { clearRefusals, field, nameLists, showRefusals, values } from "../forms.js";
import { bytes, count, duration, figure, gpus, percent } from "../format.js";
import { scalingCurve, solved, solvedPoint } from "../plan_curve.js";
import { planDrawing } from "../plan_drawing.js";
import { counts, MODELS_MAX, parseSlices, requestOf, slicesText } from "../plan_shape.js";
import { planText, shapeWords } from "../plan_words.js";
import { pipelineDrawing } from "../pipeline_drawing.js";

const ALTERNATIVES = 4;
const ASK = "Choose a model and GPUs. The solver finds the fastest plan and its scaling curve.";

export const title = () => "Plan explorer";

export async function show(root, { query, signal }) {
  const places = { refused: el("div", {}), answer: el("div", { class: "stack" }), curve: el("div", {}) };
  const slices = new Slices(parseSlices(query.get("more") ?? ""));
  const form = el("form", { class: "stack", novalidate: true }, await nameLists(), fields(query, slices));
  let current = new AbortController();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    current.abort();
    current = new AbortController();
    signal.addEventListener("abort", () => current.abort());
    clearRefusals(form, places.refused);
    const question = Object.fromEntries(Object.entries(values(form)).filter(([name]) => !name.startsWith("slice")));
    const more = slices.read();
    const address = { ...question, ...(more.length && { more: slicesText(more) }) };
    history.replaceState(null, "", `#/plans?${new URLSearchParams(address)}`);
    try {
      await explore(question, more, places, current.signal);
    } catch (error) {
      if (current.signal.aborted) return;
      put(places.answer);
      if (error instanceof Problem && error.slug === "infeasible") put(places.refused, problemNote(error));
      else showRefusals(form, places.refused, error);
    }
  });
  put(places.answer, card("Plan", empty("No plan yet", ASK)));
  const answers = el("div", { class: "stack" }, form, places.refused, places.answer, places.curve);
  put(root, el("div", { class: "head" }, el("h1", {}, "Plan explorer")), answers);
  if (query.has("model")) form.requestSubmit(); // a shared link
}

/** Creates fields filled from the URL, or with an example. */
function fields(query, slices) {
  const number = { kind: "number", min: 1 };
  const fromQuery = (name, label, props) => {
    return field(name, label, { ...props, value: query.get(name) ?? props.value ?? "" });
  };
  const button = el("button", { class: "first", type: "submit" }, "Find the plan");
  return card("Request", el("div", { class: "form" },
    fromQuery("model", "Model", { list: "models", value: "llama-2-7b", required: true }),
    fromQuery("gpu", "GPU model", { list: "gpu-models", value: "a100-80g", required: true }),
    fromQuery("gpus", "GPUs", { ...number, value: 16 }),
    fromQuery("globalBatch", "Global batch", { ...number, value: 64 }),
    fromQuery("sequenceLength", "Sequence length", { ...number, hint: "Default: that of the model." }),
    fromQuery("frozenLayers", "Frozen layers", { ...number, hint: "Default: none." })),
    slices.place,
    el("div", { class: "row" }, button, slices.button));
}

/** Fields of further GPU models, for a plan on several of them. */
class Slices {
  number = 0;

  constructor(slices) {
    this.place = el("div", { class: "slices" });
    const add = () => this.#add({ gpu: "", gpus: 8 }, true);
    this.button = el("button", { type: "button", on: { click: add } }, "Add a GPU model");
    for (const slice of slices) this.#add(slice, false);
  }

  /** Returns the further slices with a GPU model. */
  read() {
    const rows = [...this.place.children].map((row) => [...row.querySelectorAll("input")].map((input) => input.value));
    return rows.filter(([gpu]) => gpu.trim()).map(([gpu, gpus]) => ({ gpu: gpu.trim(), gpus: Number(gpus) || 1 }));
  }

  #add({ gpu, gpus: most }, isNew) {
    this.number += 1;
    const name = `slice${this.number}`;
    const remove = () => {
      row.remove();
      this.#limit();
      this.button.focus();
    };
    const row = el("div", { class: "slice", role: "group", "aria-label": "Further GPU model" },
      field(`${name}.gpu`, "Further GPU model", { list: "gpu-models", value: gpu }),
      field(`${name}.gpus`, "GPUs of it", { kind: "number", min: 1, value: most }),
      el("button", { type: "button", on: { click: remove } }, "Remove"));
    this.place.append(row);
    this.#limit();
    if (isNew) row.querySelector("input").focus();
  }

  #limit() {
    this.button.hidden = this.place.children.length >= MODELS_MAX - 1;
  }
}

async function explore(question, more, places, signal) {
  put(places.curve);
  put(places.answer, card("Plan", el("p", { class: "muted", role: "status" }, "Solving …")));
  const request = requestOf(question, more);
  const plan = await solved({ ...request, alternatives: ALTERNATIVES }, signal);
  const words = `${count(plan.candidates)} candidates evaluated in ${duration(plan.search_time_s)}`;
  const hardware = [{ gpu: question.gpu, gpus: question.gpus }, ...more];
  const total = hardware.reduce((sum, each) => sum + each.gpus, 0);
  const name = `${question.model} on ${gpus(total)}`;
  const text = () => planText(`${name} (${slicesText(hardware)})`, plan, plan.inspection);
  const head = [name, el("span", { class: "row small muted" }, words, copyButton("the plan as text", text))];
  const remark = plan.remark && el("p", { class: "note" }, plan.remark);
  const drawing = pipelineDrawing(plan, plan.inspection, signal);
  put(places.answer,
    card(head, remark, planDrawing(plan, plan.inspection)),
    drawing && card("Pipeline schedule", drawing),
    runnersUp(plan));
  if (more.length) await mixtureTable(question, more, plan, places.curve, signal);
  else await scalingCurve(question, new Map([[question.gpus, plan]]), counts(question.gpus), places.curve, signal);
}

/** Renders the plan, the next-best plans, and the best plan on all GPUs if this one leaves some out. */
function runnersUp(plan) {
  if (!plan.runners_up.length && !plan.whole) return null;
  const line = (name, other) => [
    name,
    `${shapeWords(other)}; ${other.schedule.name}, ${count(other.micro_batches)} × ${count(other.micro_batch_size)}`,
    duration(other.iteration_time_s),
    other.slower_ratio ? `+${percent(other.slower_ratio)}` : "–",
    bytes(other.peak_bytes_per_gpu),
  ];
  const rows = [
    line("Best", plan),
    ...plan.runners_up.map((other, at) => line(`${at + 2}`, other)),
    ...(plan.whole ? [line("Best on all GPUs", plan.whole)] : []),
  ];
  const columns = [["Plan"], ["Parallelism; schedule, micro-batches"], ["Step", true], ["Slower by", true],
    ["Peak memory", true]];
  return card("Next-best plans", table("Next-best plans", columns, rows));
}

/** Compares the plan on all GPU models with the plans on each of them alone. */
async function mixtureTable(question, more, plan, place, signal) {
  const status = el("p", { class: "small muted", role: "status" }, "solving each GPU model alone");
  const rows = el("div", {});
  put(place, card(["Each GPU model alone", status], rows));
  const found = [["All together", plan]];
  const draw = () => put(rows, table("Plans by GPU model", [["GPUs"], ["Plan"], ["Step", true], ["Samples/s", true]],
    found.map(([name, each]) => each.infeasible
      ? [name, el("span", { class: "muted" }, each.infeasible), "–", "–"]
      : [name, shapeWords(each), duration(each.iteration_time_s), figure(each.samples_per_s)])));
  draw();
  for (const { gpu, gpus: number } of [{ gpu: question.gpu, gpus: question.gpus }, ...more]) {
    const alone = await solvedPoint(requestOf({ ...question, gpu, gpus: number }, []), signal);
    found.push([`${count(number)} × ${gpu}`, alone]);
    draw();
  }
  status.textContent = "";
}
