// Served models of a pool: their requests, the replicas that meet the objective, and the latencies with them.

import { bar, el, facts } from "../dom.js";
import { count, duration, figure, gpus, percent, plural } from "../format.js";

const BINDING = {
  ttft: "time to first token",
  tpot: "time per output token",
  kv_cache: "KV cache",
  sequences: "running requests of a replica",
  throughput: "throughput",
  none: "none, one replica is enough",
};

/** Served models with their load, objective and sizing. Null if none are declared. */
export function servedModels(models) {
  return models.length ? el("div", { class: "served-models" }, models.map(servedModel)) : null;
}

function servedModel(served) {
  const { model, gpu, gpus_per_replica: size, load } = served;
  const replica = `${plural(size, "GPU")} (${gpu}) each`;
  const head = el("header", {}, el("h3", {}, model), el("span", { class: "muted" }, replica));
  if (!load) {
    const wait = "No requests have been read yet. Report them, or set a demand source with requests.";
    return el("article", {}, head, el("p", { class: "small muted" }, wait), objectiveFacts(served));
  }
  return el("article", {}, head, numbers(served), load.rate_per_s > 0 && latencies(served), loadFacts(served));
}

function numbers({ load, advice, sizing }) {
  const each = (name, value, note) => el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", {}, note));
  const ahead = load.ahead_replicas > load.replicas ? `${count(load.ahead_replicas)} for the rate expected next` : "";
  return el("dl", { class: "served-numbers" },
    each("Requests", `${figure(load.rate_per_s)}/s`, tokensPerSecond(load)),
    each("Replicas", count(load.replicas), [`${gpus(load.gpus)} needed`, ahead && `, ${ahead}`]),
    each("Proposed", advice ? count(advice.replicas) : "–", sizing === "off" ? "sizing is off" : `sizing: ${sizing}`));
}

function tokensPerSecond({ rate_per_s: rate, lengths }) {
  if (!lengths || !rate) return rate ? "" : "none now";
  return `${figure(rate * lengths.prompt_mean)} prompt and ${figure(rate * lengths.output_mean)} output tokens/s`;
}

/** Bars of the expected latencies within the objective, and of the use of the replicas. */
function latencies({ load, ttft_s: ttftS, tpot_s: tpotS, percentile }) {
  const share = percent(percentile);
  const row = (name, value, bound, text, state = "inference") => [
    el("dt", {}, name),
    el("dd", {}, bar(`${name}: ${text}`, [[state, Math.min(value / bound, 1)]]), el("span", {}, text)),
  ];
  const within = (value, bound) => `${duration(value)} of ${duration(bound)}`;
  return el("dl", { class: "served-bars" },
    row(`First token, ${share}`, load.ttft_s, ttftS, within(load.ttft_s, ttftS)),
    row(`Per token, ${share}`, load.tpot_s, tpotS, within(load.tpot_s, tpotS)),
    row("Utilization", load.utilization, 1, percent(load.utilization), "training"));
}

function loadFacts({ load }) {
  const { lengths } = load;
  const tokens = (mean, most) => `${count(Math.round(mean))} tokens on average, 95% up to ${count(most)}`;
  return facts([
    ["Prompts", lengths && tokens(lengths.prompt_mean, lengths.prompt_p95)],
    ["Outputs", lengths && tokens(lengths.output_mean, lengths.output_p95)],
    ["Burstiness", load.burstiness === 1 ? "" : figure(load.burstiness)],
    ["Binding limit", load.rate_per_s > 0 && (BINDING[load.binding] ?? load.binding)],
  ]);
}

function objectiveFacts({ ttft_s: ttftS, tpot_s: tpotS, percentile, sizing }) {
  return facts([
    ["Time to first token", `${duration(ttftS)} for ${percent(percentile)} of requests`],
    ["Time per output token", `${duration(tpotS)} for ${percent(percentile)} of requests`],
    ["Sizing", sizing],
  ]);
}
