// Where a job stands in figures: how far it is, when it ends, what it holds, has cost and has lost.

import { bar, card, el, facts, figureOf } from "../dom.js";
import { bytes, count, duration, figure, gpus, gpuTime, percent, plural, range } from "../format.js";
import { due, when } from "../times.js";

const ENDED = ["succeeded", "failed", "cancelled"];
const WAITS = ["queued", "planning", "submitted", "preempted"];

/** What one wants to know first. */
export function figures(job) {
  const { progress } = job;
  const now = accountNow(job);
  const steps = progress.steps_total ? `of ${count(progress.steps_total)} steps` : "steps";
  const left = progress.remaining_s === null ? null : ["ends ", due(Date.now() / 1000 + progress.remaining_s)];
  const ended = ENDED.includes(job.state) ? [`${job.state} `, when(job.state_since_s)] : "no known end";
  const loss = progress.loss === null ? "not reported yet" : `last loss ${figure(progress.loss)}`;
  const speed = progress.samples_per_s === null ? "–" : figure(progress.samples_per_s);
  const leaving = job.gpus.releasing ? `, ${job.gpus.releasing} to leave` : "";
  const held = `may hold ${range(job.gpus.min, job.gpus.max, " to ")}${leaving}`;
  const share = now.gpuS ? ` (${percent(now.lostS / now.gpuS)})` : "";
  const lost = now.lostS ? `${gpuTime(now.lostS)} lost${share}` : "none of it lost";
  const cost = `${gpuTime(now.gpuS)}, ${lost}`;
  return el("dl", { class: "figures" }, [
    figureOf(job.state, "Done", count(Math.floor(progress.steps)), steps, el("span", {}, left ?? ended)),
    figureOf("training", "GPUs", count(job.gpus.target), "", held),
    figureOf("inference", "Throughput", speed, speed === "–" ? "" : "samples/s", loss),
    figureOf(now.lostS ? "recalled" : "idle", "Waited", duration(Math.round(now.waitedS)), "", cost),
  ]);
}

/** The account is as of the last change; what is going on since goes on. */
function accountNow({ account, state, intent, gpus: held }) {
  const sinceS = ENDED.includes(state) ? 0 : Math.max(0, Date.now() / 1000 - account.settled_at_s);
  const isWaiting = WAITS.includes(state) && intent === "run";
  return {
    waitedS: account.waited_s + (isWaiting ? sinceS : 0),
    gpuS: account.gpu_s + sinceS * (held.target + held.releasing),
    lostS: account.lost_gpu_s,
  };
}

export function details(job) {
  const { progress, account, memory, spec } = job;
  const done = progress.fraction === null ? null : percent(progress.fraction);
  const nodes = Object.entries(job.nodes).map(([node, indices]) => `${node} (${indices.length})`).join(", ");
  const changes = [[account.resizes, "resize"], [account.preemptions, "preemption"], [account.failures, "failure"]];
  const changed = changes.filter(([number]) => number).map(([number, name]) => plural(number, name)).join(", ");
  return card(
    "Now",
    done && bar(`${done} done`, [["training", progress.fraction]]),
    facts([
      ["Progress", done && `${done} done`],
      ["Left", progress.remaining_s === null ? null : `${duration(Math.round(progress.remaining_s))} at this speed`],
      ["Nodes", nodes],
      ["Leaving", job.gpus.releasing ? gpus(job.gpus.releasing) : null],
      ["Step", progress.step_time_s === null ? null : duration(progress.step_time_s)],
      ["Memory", progress.peak_bytes === null ? null : `${bytes(progress.peak_bytes)} at the most on a GPU, measured`],
      ["Died of memory", memory.deaths.length ? plural(memory.deaths.length, "time") : null],
      ["Tries again", memory.retry_at_s && due(memory.retry_at_s)],
      ["Checkpoint", progress.checkpoint_steps ? `at step ${count(progress.checkpoint_steps)}` : "none yet"],
      ["Frozen layers", progress.frozen_layers || null],
      ["Queue", `${job.queue}, priority ${job.priority}`],
      ["Owner", job.owner || "nobody named"],
      ["Submitted", when(job.submitted_at_s)],
      ["First start", account.first_started_at_s && when(account.first_started_at_s)],
      ["Changes", changed || "none"],
      ["Deadline", spec.deadline && due(spec.deadline)],
      ["Model", spec.model],
      ["Global batch", spec.globalBatch],
      ["Command", spec.command.length ? el("code", {}, spec.command.map(shown).join(" ")) : null],
    ]),
  );
}

/** A word as one would type it into a shell. */
function shown(word) {
  return /^[\w./:=,@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
