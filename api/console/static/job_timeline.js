// Timeline of a job: its states, GPUs and plans as spans of time, and its runs that failed. Pure, without a document.

const RUNS = ["starting", "running", "resizing"];

/**
 * @typedef {{at_s: number, state: string, message: string}} StateChange
 * @typedef {{at_s: number, generation: number, gpus: number, lent_gpus: number, plan: string | null}} Allocation
 * @typedef {{from: number, to: number, fromS: number, toS: number, label: string, state?: string, share?: number,
 * lentShare?: number}} Span `from` and `to` are shares of the whole time, 0 to 1
 */

/**
 * Returns spans of equal neighbours: changes of `keyOf`, each until the next.
 * @template T
 * @param {(T & {at_s: number})[]} changes oldest first
 * @param {number} endS
 * @param {(change: T) => string} keyOf
 */
function runsOf(changes, endS, keyOf) {
  const runs = [];
  for (const change of changes) {
    const last = runs.at(-1);
    if (last && keyOf(last.change) === keyOf(change)) continue;
    if (last) last.toS = change.at_s;
    runs.push({ change, fromS: change.at_s, toS: endS });
  }
  return runs.filter((run) => run.toS > run.fromS || run.change === runs.at(-1)?.change);
}

/**
 * Returns the lanes of the timeline: [name, spans].
 * @param {StateChange[]} states
 * @param {Allocation[]} allocations
 * @param {{endS: number, hasEnded: boolean}} options
 * @returns {[string, Span[]][]}
 */
export function timelineLanes(states, allocations, { endS, hasEnded }) {
  if (!states.length) return [];
  const startS = Math.min(states[0].at_s, allocations[0]?.at_s ?? Infinity);
  const wholeS = Math.max(endS - startS, 1);
  const place = ({ fromS, toS }) => ({ fromS, toS, from: (fromS - startS) / wholeS, to: (toS - startS) / wholeS });
  const most = Math.max(1, ...allocations.map((each) => each.gpus));
  const stateRuns = runsOf(states, endS, (each) => each.state);
  const held = runsOf(allocations, endS, (each) => `${each.gpus} ${each.lent_gpus}`);
  const planned = runsOf(allocations, endS, (each) => (each.gpus ? each.plan ?? "" : ""));
  const shown = hasEnded ? stateRuns.slice(0, -1) : stateRuns; // the final state has no duration
  return [
    ["State", shown.map((run) => ({ ...place(run), label: run.change.state, state: run.change.state }))],
    ["GPUs", held.filter((run) => run.change.gpus).map((run) => ({
      ...place(run),
      label: gpuLabel(run.change),
      share: run.change.gpus / most,
      lentShare: run.change.lent_gpus / most,
    }))],
    ["Plan", planned.filter((run) => run.change.gpus && run.change.plan).map((run) => ({
      ...place(run),
      label: run.change.plan,
    }))],
  ];
}

function gpuLabel({ gpus, lent_gpus: lent }) {
  const noun = gpus === 1 ? "GPU" : "GPUs";
  return lent ? `${gpus} ${noun}, ${lent} of them lent` : `${gpus} ${noun}`;
}

/**
 * Returns the runs that failed, oldest first: a run fails when the job goes back to the queue, or fails for good.
 * A message has the cause first, and the last lines of the failing rank's log after it, separated by " | ".
 * @param {StateChange[]} states
 * @param {Allocation[]} allocations
 */
export function failedRuns(states, allocations) {
  const found = [];
  states.forEach((change, at) => {
    const before = states[at - 1];
    if (!before || !RUNS.includes(before.state) || !["queued", "failed"].includes(change.state)) return;
    const began = states.slice(0, at).reverse().find((each) => each.state === "starting") ?? before;
    const run = allocations.filter((each) => each.gpus && each.at_s < change.at_s).at(-1);
    const [cause, ...lines] = change.message.split(" | ");
    const generation = run?.generation ?? null;
    const ranS = change.at_s - began.at_s;
    found.push({ atS: change.at_s, ranS, generation, cause, lines, isRetried: change.state === "queued" });
  });
  return found;
}
