// Preview of a job with a model: its plan on its most GPUs, and how its speed grows from the fewest to the most GPUs.

import { get } from "../api.js";
import { card, el, put } from "../dom.js";
import { count } from "../format.js";
import { scalingCurve, solvedPoint } from "../plan_curve.js";
import { planDrawing } from "../plan_drawing.js";
import { counts } from "../plan_shape.js";
import { pipelineDrawing } from "../pipeline_drawing.js";

const NO_MODEL = "The job names no model, so it runs data parallel and its speed is assumed to grow with its GPUs. "
  + "Name a model and a global batch to see its plan.";
const NO_GPU = "Choose a GPU model to see the plan. No node of a training pool says which one to assume.";

/** Draws the plan and the curve of a job document in `place`. */
export async function submitPreview(job, place, signal) {
  if (!job.model || !job.globalBatch) return put(place, card("Plan", el("p", { class: "muted" }, NO_MODEL)));
  const gpu = job.gpu ?? (await commonGpu(signal));
  if (!gpu) return put(place, card("Plan", el("p", { class: "muted" }, NO_GPU)));
  const { min = 1, max = min } = job.gpus ?? {};
  const question = { model: job.model, gpu, globalBatch: job.globalBatch };
  if (job.sequenceLength) Object.assign(question, { sequenceLength: job.sequenceLength });
  put(place, card("Plan", el("p", { class: "muted", role: "status" }, "Solving …")));
  const plan = await solvedPoint({ ...question, gpus: max }, signal);
  const name = `Plan on ${count(max)} × ${gpu}`;
  const curve = el("div", {});
  if (plan.infeasible) put(place, card(name, el("p", { class: "note warn" }, plan.infeasible)), curve);
  else {
    const schedule = pipelineDrawing(plan, plan.inspection, signal);
    const heading = schedule && el("h3", {}, "Pipeline schedule");
    put(place, card(name, planDrawing(plan, plan.inspection), heading, schedule), curve);
  }
  return scalingCurve(question, new Map([[max, plan]]), counts(max, min), curve, signal);
}

/** Returns the GPU model with the most GPUs in training pools, or "" if there is none. */
async function commonGpu(signal) {
  const [pools, { items: nodes }] = await Promise.all([
    get("/v1/pools", { query: { limit: 1000 }, signal }),
    get("/v1/nodes", { query: { limit: 1000 }, signal }),
  ]);
  const training = new Set(pools.items.filter((pool) => pool.kind === "training").map((pool) => pool.name));
  const totals = new Map();
  for (const node of nodes.filter((each) => training.has(each.pool))) {
    totals.set(node.gpu, (totals.get(node.gpu) ?? 0) + node.gpus);
  }
  return [...totals].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "";
}
