// Drawing of a parallel plan: layers of each stage, its GPU groups, and its use of time and memory.

import { el, facts } from "./dom.js";
import { bytes, duration, gpus, percent, plural } from "./format.js";
import { devicesOf, planFacts, runsOf, strategyWords } from "./plan_words.js";

const RANKS_DRAWN_MAX = 64;
const NARROW_SHARE = 0.12;
const NEGLIGIBLE_S = 1e-6;
/** @type {[string, string][]} */
const MEMORY = [
  ["parameters", "parameters"],
  ["gradients", "gradients"],
  ["optimizer", "optimizer"],
  ["activations", "activations"],
  ["buffers", "buffers"],
  ["reserve", "reserve"],
];
const PARTS = {
  compute: "compute",
  tensor: "tensor groups",
  sequence: "sequence groups",
  expert: "expert groups",
  data: "data groups",
  other: "optimizer and host",
  idle: "idle (bubble)",
};

/** Draws a plan. `inspection`: time and memory use of each device, or null if unknown. */
export function planDrawing(plan, inspection) {
  const layers = plan.stages.at(-1).last_layer + 1;
  const devices = devicesOf(plan);
  const drawn = devices.map((chunks, at) => {
    const name = devices.length > 1 ? `Stage ${at + 1}` : "All layers";
    return deviceRow(name, chunks, { layers, plan, spent: inspection?.devices[at] });
  });
  const last = layers > 1 && el("span", {}, `layer ${layers - 1}`);
  const ends = el("div", { class: "axis" }, el("span", {}, "layer 0"), last);
  const axis = el("div", { class: "stage", "aria-hidden": "true" }, el("span"), ends);
  const whole = el("div", { class: "plan" }, drawn, axis);
  return [facts(planFacts(plan, inspection)), whole, inspection && legend(inspection)].filter(Boolean);
}

function deviceRow(name, chunks, { layers, plan, spent }) {
  const [first] = chunks;
  const hardware = el("span", { class: "muted" }, `${first.gpus} × ${first.gpu}`);
  const unsaid = distinct(chunks, layers).map((text) => el("span", {}, text));
  return el(
    "section",
    { class: "stage", "aria-label": `${name}: ${gpus(first.gpus)}` },
    el("h3", {}, name, el("br"), hardware),
    el("div", { class: "layers" }, chunks.flatMap((chunk) => runs(chunk, layers))),
    el("div", { class: "groups" }, groupsOf(first.strategies[0], first.gpus)),
    el("div", { class: "use" }, unsaid, spent ? [timeUse(spent, plan), memoryUse(spent)] : null),
  );
}

/** Draws runs of layers with one strategy, positioned by layer number. */
function runs(stage, layers) {
  return runsOf(stage).map(({ strategy, from, range }) => {
    const text = strategyWords(strategy);
    const hasNoRoom = isNarrow(strategy, layers);
    const vars = { "--from": `${(100 * from) / layers}%`, "--width": `${(100 * strategy.layers) / layers}%` };
    const kind = hasNoRoom ? "run narrow" : "run";
    const title = `Layers ${range}: ${text}`;
    return el("span", { class: kind, title, vars }, hasNoRoom ? range : `${range} · ${text}`);
  });
}

/** Returns the distinct strategies of runs that are too narrow for a label. */
function distinct(chunks, layers) {
  const narrow = chunks.flatMap((chunk) => chunk.strategies.filter((each) => isNarrow(each, layers)));
  return [...new Set(narrow.map(strategyWords))];
}

function isNarrow(strategy, layers) {
  return strategy.layers / layers < NARROW_SHARE;
}

/** Draws GPU groups: one box per data replica, containing its sequence shards, which contain tensor shards. */
function groupsOf({ dp, ulysses, ring, tp }, total) {
  const sequence = ulysses * ring;
  const label = [
    plural(dp, "data group"),
    sequence > 1 && plural(sequence, "sequence shard"),
    tp > 1 && plural(tp, "tensor shard"),
  ].filter(Boolean).join(" of ");
  if (total > RANKS_DRAWN_MAX) return el("p", { class: "small muted" }, label);
  const group = (ranks) => el("span", { class: "group" }, ranks);
  const tensor = (first) => Array.from({ length: tp }, (_, at) => el("span", { class: "rank" }, first + at));
  const replica = (first) => {
    const shards = Array.from({ length: sequence }, (_, at) => tensor(first + at * tp));
    return group(sequence > 1 ? shards.map(group) : shards.flat());
  };
  const replicas = Array.from({ length: dp }, (_, at) => replica(at * sequence * tp));
  const words = el("span", { class: "small muted" }, label);
  return el("div", { class: "row", role: "img", "aria-label": label }, replicas, words);
}

function timeUse(spent, plan) {
  /** @type {[string, number][]} */
  const times = Object.keys(PARTS).map((name) => [name, spent[`${name}_s`]]);
  const parts = times.filter(([, each]) => each > NEGLIGIBLE_S);
  const words = ([name, seconds]) => `${PARTS[name]} ${duration(seconds)}`;
  const text = parts.map(words).join(", ");
  const spans = parts.map(([name, seconds]) => {
    const vars = { "--share": `${(100 * seconds) / plan.iteration_time_s}%` };
    return el("span", { class: `part-${name}`, title: words([name, seconds]), vars });
  });
  const drawn = el("div", { class: "bar", role: "img", "aria-label": `Step time: ${text}` }, spans);
  return [el("span", {}, `Time: ${text}; bound by ${spent.bound}`), drawn];
}

function memoryUse(spent) {
  const share = spent.memory_bytes / spent.memory_bytes_max;
  const held = plural(spent.micro_batches_held, "micro-batch", "micro-batches");
  const whole = `${bytes(spent.memory_bytes)} of ${bytes(spent.memory_bytes_max)} (${percent(share)})`;
  const offloaded = spent.host_bytes ? `, ${bytes(spent.host_bytes)} per GPU on the host` : "";
  const text = `Memory: ${whole}, ${held} held${spent.memory_near_limit ? ", near the limit" : ""}${offloaded}`;
  const parts = MEMORY.map(([name, words]) => [name, `${words} ${bytes(spent.memory_parts[name])}`]);
  const spans = parts.filter(([name]) => spent.memory_parts[name]).map(([name, title]) => {
    const vars = { "--share": `${(100 * spent.memory_parts[name]) / spent.memory_bytes_max}%` };
    return el("span", { class: `memory-${name}`, title, vars });
  });
  const label = `${text}: ${parts.map(([, words]) => words).join(", ")}`;
  return [el("span", {}, text), el("div", { class: "bar", role: "img", "aria-label": label }, spans)];
}

function legend(inspection) {
  const isSpent = (name) => inspection.devices.some((device) => device[`${name}_s`] > NEGLIGIBLE_S);
  const isHeld = (name) => inspection.devices.some((device) => device.memory_parts[name]);
  const entry = (kind, name) => el("li", {}, el("span", { class: `swatch ${kind}` }), name);
  const spent = Object.keys(PARTS).filter(isSpent).map((name) => entry(`part-${name}`, PARTS[name]));
  const held = MEMORY.filter(([name]) => isHeld(name)).map(([name, words]) => entry(`memory-${name}`, words));
  return el("div", { class: "stack legends" },
    el("ul", { class: "legend", "aria-label": "Parts of a step" }, el("li", {}, el("b", {}, "Time")), spent),
    el("ul", { class: "legend", "aria-label": "Parts of memory" }, el("li", {}, el("b", {}, "Memory")), held));
}
