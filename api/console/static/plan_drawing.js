// A parallel plan drawn: stages by layers, the groups of GPUs of each stage, and where its memory and time go.

import { bar, el, facts } from "./dom.js";
import { bytes, duration, figure, gpus, percent, plural } from "./format.js";

const RANKS_DRAWN_MAX = 64;
const NARROW_SHARE = 0.12;
const PARTS = ["compute", "tensor", "sequence", "expert", "data", "other", "idle"];
const NAMES = { compute: "computing", tensor: "tensor groups", sequence: "sequence groups", expert: "expert groups", data: "data groups", other: "optimizer and host", idle: "waiting" };
const SHARDING = ["", "optimizer sharded", "gradients sharded", "parameters sharded (FSDP)"];

/** `inspection`: how each device spends its step; null where nobody can tell. */
export function planDrawing(plan, inspection) {
  const layers = plan.stages.at(-1).last_layer + 1;
  const devices = Math.max(1, plan.stages.length / plan.schedule.interleave);
  const drawn = Array.from({ length: devices }, (_, at) => {
    const chunks = plan.stages.filter((_, stage) => stage % devices === at);
    return deviceRow(at, chunks, { layers, plan, spent: inspection?.devices[at], devices });
  });
  const last = plan.stages.length > 1 || layers > 1;
  const axis = el("div", { class: "stage", "aria-hidden": "true" }, el("span"), el("div", { class: "axis" }, el("span", {}, "layer 0"), last && el("span", {}, `layer ${layers - 1}`)));
  return [summary(plan, inspection), el("div", { class: "plan" }, drawn, axis), inspection && legend(inspection)].filter(Boolean);
}

function summary(plan, inspection) {
  const world = plan.stages.slice(0, plan.stages.length / plan.schedule.interleave).reduce((sum, stage) => sum + stage.gpus, 0);
  const chunks = plan.schedule.interleave > 1 ? `, ${plan.schedule.interleave} chunks a stage` : "";
  return facts([
    ["Step", `${duration(plan.iteration_time_s)}, ${figure(plan.samples_per_s)} samples/s, predicted`],
    ["Batch", `${plural(plan.micro_batches, "micro-batch", "micro-batches")} of ${plan.micro_batch_size}, on ${gpus(world)}`],
    ["Schedule", `${plan.schedule.name}${chunks}`],
    ["Peak memory", plan.peak_bytes_per_gpu ? `${bytes(plan.peak_bytes_per_gpu)} a GPU` : null],
    ["Waiting", inspection && `${percent(inspection.bubble_ratio)} of all GPU time`],
    ["Model FLOPs used", inspection && percent(inspection.model_flops_utilization)],
    ["Proven", plan.optimality_gap > 0 ? `within ${percent(plan.optimality_gap)} of the best` : "the best there is"],
  ]);
}

function deviceRow(at, chunks, { layers, plan, spent, devices }) {
  const [first] = chunks;
  const name = devices > 1 ? `Stage ${at + 1}` : "All layers";
  const runs = chunks.flatMap((chunk) => runsOf(chunk, layers));
  return el(
    "section",
    { class: "stage", "aria-label": `${name}: ${gpus(first.gpus)}` },
    el("h3", {}, name, el("br"), el("span", { class: "muted" }, `${first.gpus} × ${first.gpu}`)),
    el("div", { class: "layers" }, runs),
    el("div", { class: "groups" }, groupsOf(first.strategies[0], first.gpus)),
    el("div", { class: "use" }, distinct(chunks, layers).map((told) => el("span", {}, told)), spent ? timeUse(spent, plan) : null, spent ? memoryUse(spent) : null),
  );
}

/** Runs of layers under one strategy, each where its layers stand. */
function runsOf(stage, layers) {
  let from = stage.first_layer;
  return stage.strategies.map((strategy) => {
    const told = words(strategy);
    const range = strategy.layers > 1 ? `${from}–${from + strategy.layers - 1}` : `${from}`;
    const hasNoRoom = isNarrow(strategy, layers);
    const run = el("span", { class: hasNoRoom ? "run narrow" : "run", title: `Layers ${range}: ${told}`, vars: { "--from": `${(100 * from) / layers}%`, "--width": `${(100 * strategy.layers) / layers}%` } }, hasNoRoom ? range : `${range} · ${told}`);
    from += strategy.layers;
    return run;
  });
}

/** What layers do of which the drawing has no room to say it, each way once. */
function distinct(chunks, layers) {
  return [...new Set(chunks.flatMap((chunk) => chunk.strategies.filter((each) => isNarrow(each, layers)).map(words)))];
}

function isNarrow(strategy, layers) {
  return strategy.layers / layers < NARROW_SHARE;
}

function words(strategy) {
  const degrees = [["tensor", strategy.tp], ["Ulysses", strategy.ulysses], ["ring", strategy.ring], ["experts", strategy.ep], ["data", strategy.dp]];
  const told = degrees.filter(([, degree]) => degree > 1).map(([name, degree]) => `${name} ×${degree}`);
  const more = [SHARDING[strategy.zero], strategy.recompute !== "none" && `recompute ${strategy.recompute}`, strategy.offload && "offloaded"];
  return [...(told.length ? told : ["one GPU"]), ...more.filter(Boolean)].join(", ");
}

/** GPUs by group: each replica of the data a box, in it its sequence shards, in these its tensor shards. */
function groupsOf(strategy, total) {
  const sequence = strategy.ulysses * strategy.ring;
  const label = `${plural(strategy.dp, "data group")} of ${plural(sequence, "sequence shard")} of ${plural(strategy.tp, "tensor shard")}`;
  if (total > RANKS_DRAWN_MAX) return el("p", { class: "small muted" }, label);
  const rank = (number) => el("span", { class: "rank" }, number);
  const tensor = (first) => Array.from({ length: strategy.tp }, (_, at) => rank(first + at));
  const replica = (first) => {
    const shards = Array.from({ length: sequence }, (_, at) => tensor(first + at * strategy.tp));
    return el("span", { class: "group" }, sequence > 1 ? shards.map((shard) => el("span", { class: "group" }, shard)) : shards.flat());
  };
  const replicas = Array.from({ length: strategy.dp }, (_, at) => replica(at * sequence * strategy.tp));
  return el("div", { class: "row", role: "img", "aria-label": label, title: label }, replicas);
}

function timeUse(spent, plan) {
  const parts = PARTS.map((name) => [name, spent[`${name}_s`]]).filter(([, seconds]) => seconds > 0);
  const told = parts.map(([name, seconds]) => `${NAMES[name]} ${duration(seconds)}`).join(", ");
  const spans = parts.map(([name, seconds]) => el("span", { class: `part-${name}`, title: `${NAMES[name]}: ${duration(seconds)}`, vars: { "--share": `${(100 * seconds) / plan.iteration_time_s}%` } }));
  return [el("span", {}, `Time: ${told}; bound by ${spent.bound}`), el("div", { class: "bar", role: "img", "aria-label": `Time of a step: ${told}` }, spans)];
}

function memoryUse(spent) {
  const share = spent.memory_bytes / spent.memory_bytes_max;
  const told = `Memory: ${bytes(spent.memory_bytes)} of ${bytes(spent.memory_bytes_max)} (${percent(share)}), ${plural(spent.micro_batches_held, "micro-batch", "micro-batches")} held`;
  return [el("span", {}, told), bar(told, [[spent.memory_near_limit ? "lent" : "inference", Math.min(1, share)]])];
}

function legend(inspection) {
  const present = PARTS.filter((name) => inspection.devices.some((device) => device[`${name}_s`] > 0));
  return el("ul", { class: "legend", "aria-label": "Parts of a step" }, present.map((name) => el("li", {}, el("span", { class: `swatch part-${name}` }), NAMES[name])));
}
