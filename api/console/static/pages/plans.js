// Plan explorer: the fastest plan of a model on a number of GPUs, and its scaling curve.

import { post, Problem } from "../api.js";
import { problemNote } from "../dialogs.js";
import { card, copyButton, el, empty, put, table } from "../dom.js";
import { clearRefusals, field, nameLists, showRefusals, values } from "../forms.js";
import { count, duration, figure, gpus, percent } from "../format.js";
import { planDrawing } from "../plan_drawing.js";
import { devicesOf, planText } from "../plan_words.js";
import { chart } from "../plotting.js";

const BUSY_MS = 1200;
const BUSY_TRIES = 30;
const ASK = "Choose a model and GPUs. The solver finds the fastest plan and its scaling curve.";

export const title = () => "Plan explorer";

export async function show(root, { query, signal }) {
  const places = { refused: el("div", {}), answer: el("div", { class: "stack" }), curve: el("div", {}) };
  const form = el("form", { class: "stack", novalidate: true }, await nameLists(), fields(query));
  let current = new AbortController();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    current.abort();
    current = new AbortController();
    signal.addEventListener("abort", () => current.abort());
    clearRefusals(form, places.refused);
    const question = values(form);
    history.replaceState(null, "", `#/plans?${new URLSearchParams(question)}`);
    try {
      await explore(question, places, current.signal);
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
function fields(query) {
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
    el("div", { class: "row" }, button));
}

async function explore(question, places, signal) {
  put(places.curve);
  put(places.answer, card("Plan", el("p", { class: "muted", role: "status" }, "Solving …")));
  const plan = await solved(question, signal);
  const words = `${count(plan.candidates)} candidates evaluated in ${duration(plan.search_time_s)}`;
  const name = `${question.model} on ${gpus(question.gpus)}`;
  const copy = copyButton("the plan as text", () => planText(`${name} (${question.gpu})`, plan, plan.inspection));
  const remark = plan.remark && el("p", { class: "note" }, plan.remark);
  const head = [name, el("span", { class: "row small muted" }, words, copy)];
  put(places.answer, card(head, remark, planDrawing(plan, plan.inspection)));
  await scalingCurve(question, plan, places.curve, signal);
}

/** Solves the points one by one, so that other users can use the solver in between, and draws each when solved. */
async function scalingCurve(question, plan, place, signal) {
  const points = new Map([[question.gpus, plan]]);
  const body = el("div", {});
  const status = el("p", { class: "small muted", role: "status" });
  const rows = el("div", {});
  put(place, card(["Scaling curve", status], body, rows));
  const series = [
    { label: "Throughput", colour: "training", points: true },
    { label: "Linear scaling", colour: "muted", dash: [4, 4], width: 1 },
  ];
  const drawn = chart(body, { label: "Throughput by GPUs", xs: "GPUs", unit: "samples/s", series }, signal);
  const wanted = counts(question.gpus);
  for (const [at, number] of wanted.entries()) {
    status.textContent = `solving ${gpus(number)}, ${at + 1} of ${wanted.length}`;
    if (!points.has(number)) points.set(number, await pointOf({ ...question, gpus: number }, signal));
    draw(points, drawn, rows);
  }
  status.textContent = `up to ${gpus(question.gpus)}`;
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

/** Requests a plan. Retries while the solver is busy. */
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
  const numbers = feasible.map(([number]) => number);
  drawn.update([numbers, feasible.map(([, plan]) => plan.samples_per_s), numbers.map((number) => number * one)]);
  const lines = sorted.map(([number, plan]) => {
    if (plan.infeasible) return [count(number), el("span", { class: "muted" }, plan.infeasible), "–", "–", "–"];
    const { iteration_time_s: stepS, samples_per_s: speed } = plan;
    return [count(number), shape(plan), duration(stepS), figure(speed), percent(speed / (number * one))];
  });
  const columns = [["GPUs"], ["Plan"], ["Step", true], ["Samples/s", true], ["Efficiency", true]];
  put(rows, table("Plans by GPUs", columns, lines));
}

function shape(plan) {
  const [{ tp, dp, ulysses, ring }] = plan.stages[0].strategies;
  const stages = devicesOf(plan).length;
  const degrees = [["pipeline", stages], ["tensor", tp], ["sequence", ulysses * ring], ["data", dp]];
  const status = degrees.filter(([, degree]) => degree > 1).map(([name, degree]) => `${name} ×${degree}`);
  return status.join(", ") || "one GPU";
}
