// Plan explorer: the fastest plan of a model on so many GPUs, and how its speed grows with them.

import { post, Problem } from "../api.js";
import { problemNote } from "../dialogs.js";
import { card, el, empty, put, table } from "../dom.js";
import { clearRefusals, field, nameLists, showRefusals, values } from "../forms.js";
import { count, duration, figure, gpus, percent } from "../format.js";
import { planDrawing } from "../plan_drawing.js";
import { chart } from "../plotting.js";

const BUSY_MS = 1200;
const BUSY_TRIES = 30;

export const title = () => "Plan explorer";

export async function show(root, { signal }) {
  const places = { refused: el("div", {}), answer: el("div", { class: "stack" }), curve: el("div", {}) };
  const form = el("form", { class: "stack", novalidate: true }, await nameLists(), fields());
  let current = new AbortController();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    current.abort();
    current = new AbortController();
    signal.addEventListener("abort", () => current.abort());
    clearRefusals(form, places.refused);
    try {
      await explore(values(form), places, current.signal);
    } catch (error) {
      if (current.signal.aborted) return;
      put(places.answer);
      if (error.slug === "infeasible") put(places.refused, problemNote(error));
      else showRefusals(form, places.refused, error);
    }
  });
  put(places.answer, card("Plan", empty("Nothing asked yet", "Name a model, a GPU model and a number of GPUs; the solver finds the fastest plan, and how the model scales.")));
  put(root, el("div", { class: "head" }, el("h1", {}, "Plan explorer")), el("div", { class: "stack" }, form, places.refused, places.answer, places.curve));
}

function fields() {
  return card("Question", el("div", { class: "form" },
    field("model", "Model", { list: "models", value: "llama-2-7b", required: true }),
    field("gpu", "GPU model", { list: "gpu-models", value: "a100-80g", required: true }),
    field("gpus", "GPUs", { kind: "number", value: 16, min: 1 }),
    field("globalBatch", "Global batch", { kind: "number", value: 64, min: 1 }),
    field("sequenceLength", "Sequence length", { kind: "number", hint: "Empty: the model's own." }),
    field("frozenLayers", "Frozen layers", { kind: "number", hint: "Empty: none." })),
    el("div", { class: "row" }, el("button", { class: "first", type: "submit" }, "Find the plan")));
}

async function explore(question, places, signal) {
  put(places.curve);
  put(places.answer, card("Plan", el("p", { class: "muted", role: "status" }, "The solver is looking …")));
  const plan = await solved(question, signal);
  const words = `${count(plan.candidates)} strategies looked at in ${duration(plan.search_time_s)}`;
  put(places.answer, card([`${question.model} on ${gpus(question.gpus)}`, el("span", { class: "small muted" }, words)], plan.remark && el("p", { class: "note" }, plan.remark), planDrawing(plan, plan.inspection)));
  await scalingCurve(question, plan, places.curve, signal);
}

/** Points are solved one after the other, so that others find the solver free; each is drawn as it comes. */
async function scalingCurve(question, plan, place, signal) {
  const points = new Map([[question.gpus, plan]]);
  const body = el("div", {});
  const told = el("p", { class: "small muted", role: "status" });
  const rows = el("div", {});
  put(place, card(["Scaling curve", told], body, rows));
  const series = [{ label: "Throughput", colour: "training", points: true }, { label: "If every GPU helped as much as the first", colour: "muted", dash: [4, 4], width: 1 }];
  const drawn = chart(body, { label: "Throughput by GPUs", xs: "GPUs", unit: "samples/s", series }, signal);
  const wanted = counts(question.gpus);
  for (const [at, number] of wanted.entries()) {
    told.textContent = `solving ${gpus(number)}, ${at + 1} of ${wanted.length}`;
    if (!points.has(number)) points.set(number, await pointOf({ ...question, gpus: number }, signal));
    draw(points, drawn, rows);
  }
  told.textContent = `up to ${gpus(question.gpus)}`;
}

function counts(most) {
  const found = [];
  for (let number = 1; number < most; number *= 2) found.push(number);
  return [...found, most];
}

async function pointOf(question, signal) {
  try {
    return await solved(question, signal);
  } catch (error) {
    if (error instanceof Problem && error.slug === "infeasible") return { infeasible: error.message };
    throw error;
  }
}

/** Asks again while the solver is busy with others. */
async function solved(question, signal) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await post("/v1/plans", question, { signal });
    } catch (error) {
      if (!(error instanceof Problem && error.status === 429) || tries === BUSY_TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, BUSY_MS));
    }
  }
}

function draw(points, drawn, rows) {
  const sorted = [...points].sort((a, b) => a[0] - b[0]);
  const feasible = sorted.filter(([, plan]) => !plan.infeasible);
  const [first] = feasible;
  const one = first ? first[1].samples_per_s / first[0] : 0;
  drawn.update([feasible.map(([number]) => number), feasible.map(([, plan]) => plan.samples_per_s), feasible.map(([number]) => number * one)]);
  const lines = sorted.map(([number, plan]) => plan.infeasible
    ? [count(number), el("span", { class: "muted" }, plan.infeasible), "–", "–", "–"]
    : [count(number), shape(plan), duration(plan.iteration_time_s), figure(plan.samples_per_s), percent(plan.samples_per_s / (number * one))]);
  put(rows, table("Plans by GPUs", [["GPUs"], ["Plan"], ["Step", true], ["Samples/s", true], ["Efficiency", true]], lines));
}

function shape(plan) {
  const [{ tp, dp, ulysses, ring }] = plan.stages[0].strategies;
  const devices = plan.stages.length / plan.schedule.interleave;
  const degrees = [["pipeline", devices], ["tensor", tp], ["sequence", ulysses * ring], ["data", dp]].filter(([, degree]) => degree > 1);
  return degrees.map(([name, degree]) => `${name} ×${degree}`).join(", ") || "one GPU";
}
