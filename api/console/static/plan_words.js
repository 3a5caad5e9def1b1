// Text form of a parallel plan: strategies, facts, and the whole plan as text to copy.

import { bytes, duration, figure, gpus, percent, plural } from "./format.js";

const SHARDING = ["", "optimizer sharded", "gradients sharded", "parameters sharded (FSDP)"];

/** Formats a strategy: tensor ×2, data ×4, recompute full. */
export function strategyWords(strategy) {
  const { tp, ulysses, ring, ep, dp, zero, recompute, offload } = strategy;
  const degrees = [["tensor", tp], ["Ulysses", ulysses], ["ring", ring], ["experts", ep], ["data", dp]];
  const known = degrees.filter(([, degree]) => degree > 1).map(([name, degree]) => `${name} ×${degree}`);
  const more = [SHARDING[zero], recompute !== "none" && `recompute ${recompute}`, offload && "offloaded"];
  return [...(known.length ? known : ["one GPU"]), ...more.filter(Boolean)].join(", ");
}

/** Formats the degrees of a plan's first layers: pipeline ×2, data ×8. */
export function shapeWords(plan) {
  const [{ tp, dp, ulysses, ring }] = plan.stages[0].strategies;
  const stages = devicesOf(plan).length;
  const degrees = [["pipeline", stages], ["tensor", tp], ["sequence", ulysses * ring], ["data", dp]];
  const words = degrees.filter(([, degree]) => degree > 1).map(([name, degree]) => `${name} ×${degree}`);
  return words.join(", ") || "one GPU";
}

/** Groups stages by device. With interleaving, each device has several chunks of layers. */
export function devicesOf(plan) {
  const devices = Math.max(1, plan.stages.length / plan.schedule.interleave);
  return Array.from({ length: devices }, (_, at) => plan.stages.filter((_, stage) => stage % devices === at));
}

/** Returns facts on the whole plan as [name, text]; the text is null if unknown. */
export function planFacts(plan, inspection) {
  const world = devicesOf(plan).reduce((sum, [stage]) => sum + stage.gpus, 0);
  const chunks = plan.schedule.interleave > 1 ? `, ${plan.schedule.interleave} chunks per stage` : "";
  const batches = plural(plan.micro_batches, "micro-batch", "micro-batches");
  return [
    ["Step", `${duration(plan.iteration_time_s)}, ${figure(plan.samples_per_s)} samples/s, predicted`],
    ["Batch", `${batches} of ${plural(plan.micro_batch_size, "sample")}, on ${gpus(world)}`],
    ["Schedule", `${plan.schedule.name}${chunks}`],
    ["Peak memory", plan.peak_bytes_per_gpu ? `${bytes(plan.peak_bytes_per_gpu)} per GPU, predicted` : null],
    ["Bubble", inspection && `${percent(inspection.bubble_ratio)} of all GPU time`],
    ["Model FLOPS utilization", inspection && percent(inspection.model_flops_utilization)],
    ["Optimality", plan.is_estimated ? "estimated: the job has not reported progress" : optimality(plan)],
  ];
}

function optimality(plan) {
  return plan.optimality_gap > 0 ? `within ${percent(plan.optimality_gap)} of the optimum` : "optimal";
}

/** Formats the plan as plain text: one line per fact and per run of layers. */
export function planText(name, plan, inspection) {
  const known = planFacts(plan, inspection).filter(([, words]) => words);
  const facts = known.map(([fact, words]) => `${fact.padEnd(25)}${words}`);
  const stages = devicesOf(plan).flatMap((chunks, at) => [
    `Stage ${at + 1} of ${devicesOf(plan).length}, ${chunks[0].gpus} × ${chunks[0].gpu}`,
    ...chunks.flatMap(runsOf).map((run) => `  layers ${run.range}: ${strategyWords(run.strategy)}`),
  ]);
  return [name, ...facts, ...stages, ""].join("\n");
}

/** Returns runs of layers with one strategy: {strategy, from, range}. */
export function runsOf(stage) {
  let next = stage.first_layer;
  return stage.strategies.map((strategy) => {
    const from = next;
    next += strategy.layers;
    return { strategy, from, range: strategy.layers > 1 ? `${from}–${next - 1}` : `${from}` };
  });
}
