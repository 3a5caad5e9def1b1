// Key figures and details of a job: progress, remaining time, GPUs, used and lost GPU time, and cost.

import { bar, card, el, facts, figureOf } from "../dom.js";
import { bytes, count, duration, figure, gpus, gpuTime, money, percent, plural, range } from "../format.js";
import { labelChips } from "../label_chips.js";
import { due, when } from "../times.js";

const ENDED = ["succeeded", "failed", "cancelled"];
const WAITS = ["queued", "planning", "submitted", "preempted"];

/**
 * Renders the key figures.
 * @param {any} job
 * @param {any} spent cost of the job so far
 */
export function figures(job, spent) {
  const { progress } = job;
  const heldS = spent.held_gpu_s;
  const lostS = job.account.lost_gpu_s;
  const isKnown = progress.steps !== null;
  const steps = isKnown ? count(Math.floor(progress.steps)) : "–";
  const length = progress.steps_total ? `of ${count(progress.steps_total)} steps` : "steps";
  const { remaining_s: leftS } = progress.estimate ?? progress;
  const ends = progress.estimate ? "estimated end " : "ends ";
  const left = leftS === null ? null : [ends, due(Date.now() / 1000 + leftS)];
  const ended = ENDED.includes(job.state) ? [`${job.state} `, when(job.state_since_s)] : "end unknown";
  const loss = progress.loss === null ? "not reported yet" : `last loss ${figure(progress.loss)}`;
  const speed = progress.samples_per_s === null ? "–" : figure(progress.samples_per_s);
  const leaving = job.gpus.releasing ? `, ${job.gpus.releasing} releasing` : "";
  const held = `range ${range(job.gpus.min, job.gpus.max, " to ")}${leaving}`;
  const share = heldS ? ` (${percent(lostS / heldS)})` : "";
  const hasLost = lostS >= 1; // sums of floats leave millionths of a second
  const lost = hasLost ? `${gpuTime(lostS)} lost${share}` : "no work lost";
  const used = `${gpuTime(heldS)}, ${lost}`;
  return el("dl", { class: "figures" }, [
    figureOf(job.state, "Steps done", steps, isKnown ? length : "not reported", el("span", {}, left ?? ended)),
    figureOf("training", "GPUs", count(job.gpus.target), "", held),
    figureOf("inference", "Throughput", speed, speed === "–" ? "" : "samples/s", loss),
    figureOf(hasLost ? "recalled" : "idle", "Time pending", duration(Math.round(waitedNow(job))), "", used),
    spent.amounts && costFigure(spent),
  ]);
}

function costFigure({ amounts, currency, unpriced }) {
  const onLoan = `${money(amounts.on_loan, currency)} of it on loan`;
  const without = unpriced.length > 0 && `, without ${unpriced.join(", ")}`;
  return figureOf("lent", "Cost so far", money(amounts.used, currency), "", el("span", {}, onLoan, without));
}

/** Extrapolates the time pending, which is as of the last change, to now. */
function waitedNow({ account, state, intent }) {
  const isWaiting = WAITS.includes(state) && intent === "run";
  return account.waited_s + (isWaiting ? Math.max(0, Date.now() / 1000 - account.settled_at_s) : 0);
}

export function details(job) {
  const { progress, account, memory, spec } = job;
  const done = progress.fraction === null ? null : percent(progress.fraction);
  const { estimate } = progress;
  const shownFraction = estimate?.fraction ?? null;
  const estimated = shownFraction === null ? "not reported" : `not reported; estimated ${percent(shownFraction)} done`;
  const { remaining_s: leftS, step_time_s: stepS } = estimate ?? progress;
  const mark = estimate ? "estimated " : "";
  const left = leftS === null ? null : `${mark}${duration(Math.round(leftS))}${estimate ? "" : " at this speed"}`;
  const nodes = Object.entries(job.nodes).map(([node, indices]) => `${node} (${indices.length})`).join(", ");
  const changes = [[account.resizes, "resize"], [account.preemptions, "preemption"], [account.failures, "failure"]];
  const changed = changes.filter(([number]) => number).map(([number, name]) => plural(number, name)).join(", ");
  return card(
    "Details",
    done && bar(`${done} done`, [["training", progress.fraction]]),
    facts([
      ["Progress", estimate ? estimated : done && `${done} done`],
      ["Time left", left],
      ["Nodes", nodes],
      ["Releasing", job.gpus.releasing ? gpus(job.gpus.releasing) : null],
      ["Step time", stepS === null ? null : `${mark}${duration(stepS)}`],
      ["Memory", progress.peak_bytes === null ? null : `${bytes(progress.peak_bytes)} peak per GPU, measured`],
      ["Out of memory", memory.deaths.length ? plural(memory.deaths.length, "time") : null],
      ["Next retry", memory.retry_at_s && due(memory.retry_at_s)],
      ["Checkpoint", progress.checkpoint_steps ? `at step ${count(progress.checkpoint_steps)}` : "none yet"],
      ["On resize", job.resize_mode],
      ["Last failure", job.failure && failureText(job.failure)],
      ["Frozen layers", progress.frozen_layers || null],
      ["Queue", `${job.queue}, priority ${job.priority}`],
      ["Owner", job.owner || "none"],
      ["Labels", labelChips(job.labels)],
      ["Submitted", when(job.submitted_at_s)],
      ["First start", account.first_started_at_s && when(account.first_started_at_s)],
      ["Disruptions", changed || "none"],
      ["Deadline", spec.deadline && due(spec.deadline)],
      ["Model", spec.model],
      ["Global batch", spec.globalBatch],
      ["Command", spec.command.length ? el("code", {}, spec.command.map(shown).join(" ")) : null],
    ]),
  );
}

/** Formats the last failed run: its cause and the last lines of the failing rank's log. */
function failureText({ code, reason, at_s: atS }) {
  const lines = reason.split(" | ").join("\n");
  return el("span", {}, code && `${code}, `, when(atS), el("pre", { class: "small" }, lines));
}

/** Quotes a word for a shell. */
function shown(word) {
  return /^[\w./:=,@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
