// A parallel plan in words: what layers do, and the whole plan as text to print, to paste or to compare.

import { bytes, duration, figure, gpus, percent, plural } from "./format.js";

const SHARDING = ["", "optimizer sharded", "gradients sharded", "parameters sharded (FSDP)"];

/** What a run of layers does: tensor ×2, data ×4, recompute full. */
export function strategyWords(strategy) {
  const { tp, ulysses, ring, ep, dp, zero, recompute, offload } = strategy;
  const degrees = [["tensor", tp], ["Ulysses", ulysses], ["ring", ring], ["experts", ep], ["data", dp]];
  const told = degrees.filter(([, degree]) => degree > 1).map(([name, degree]) => `${name} ×${degree}`);
  const more = [SHARDING[zero], recompute !== "none" && `recompute ${recompute}`, offload && "offloaded"];
  return [...(told.length ? told : ["one GPU"]), ...more.filter(Boolean)].join(", ");
}

/** Stages on devices: with interleaving, each device has several chunks of layers. */
export function devicesOf(plan) {
  const devices = Math.max(1, plan.stages.length / plan.schedule.interleave);
  return Array.from({ length: devices }, (_, at) => plan.stages.filter((_, stage) => stage % devices === at));
}

/** What is to be known of a plan as a whole: [name, words]; words are null where nobody can tell. */
export function planFacts(plan, inspection) {
  const world = devicesOf(plan).reduce((sum, [stage]) => sum + stage.gpus, 0);
  const chunks = plan.schedule.interleave > 1 ? `, ${plan.schedule.interleave} chunks a stage` : "";
  const batches = plural(plan.micro_batches, "micro-batch", "micro-batches");
  return [
    ["Step", `${duration(plan.iteration_time_s)}, ${figure(plan.samples_per_s)} samples/s, predicted`],
    ["Batch", `${batches} of ${plural(plan.micro_batch_size, "sample")}, on ${gpus(world)}`],
    ["Schedule", `${plan.schedule.name}${chunks}`],
    ["Peak memory", plan.peak_bytes_per_gpu ? `${bytes(plan.peak_bytes_per_gpu)} a GPU, predicted` : null],
    ["Waiting", inspection && `${percent(inspection.bubble_ratio)} of all GPU time`],
    ["Model FLOPs used", inspection && percent(inspection.model_flops_utilization)],
    ["Proven", plan.optimality_gap > 0 ? `within ${percent(plan.optimality_gap)} of the best` : "the best there is"],
  ];
}

/** The plan as plain text, a line for each fact and each run of layers. */
export function planText(name, plan, inspection) {
  const told = planFacts(plan, inspection).filter(([, words]) => words);
  const facts = told.map(([fact, words]) => `${fact.padEnd(18)}${words}`);
  const stages = devicesOf(plan).flatMap((chunks, at) => [
    `Stage ${at + 1} of ${devicesOf(plan).length}, ${chunks[0].gpus} × ${chunks[0].gpu}`,
    ...chunks.flatMap(runsOf).map((run) => `  layers ${run.range}: ${strategyWords(run.strategy)}`),
  ]);
  return [name, ...facts, ...stages, ""].join("\n");
}

/** Runs of layers under one strategy: {strategy, from, range}. */
export function runsOf(stage) {
  let next = stage.first_layer;
  return stage.strategies.map((strategy) => {
    const from = next;
    next += strategy.layers;
    return { strategy, from, range: strategy.layers > 1 ? `${from}–${next - 1}` : `${from}` };
  });
}
