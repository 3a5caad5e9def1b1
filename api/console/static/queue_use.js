// Use of a queue relative to its guarantee and limit.

import { bar } from "./dom.js";
import { count, gpus } from "./format.js";

/** Draws the queue's use relative to its limit or guarantee. */
export function queueBar(queue) {
  const whole = Math.max(1, queue.limit_gpus ?? 0, queue.guaranteed_gpus, queue.used_gpus);
  const shown = bar(describeUse(queue), [
    ["training", queue.own_gpus / whole],
    ["borrowed", queue.borrowed_gpus / whole],
  ]);
  shown.title = describeUse(queue);
  return shown;
}

/** Returns the GPUs of the guarantee that the queue does not use now, so that others can borrow them. */
export function unusedGuarantee(queue) {
  return Math.max(0, queue.guaranteed_gpus - queue.own_gpus);
}

/** Formats a limit. Null is no limit. */
export function limitText(limit) {
  return limit === null ? "none" : count(limit);
}

function describeUse(queue) {
  const own = `${gpus(queue.own_gpus)} within its guarantee, ${count(queue.borrowed_gpus)} borrowed`;
  return `${own}; ${count(queue.guaranteed_gpus)} guaranteed, limit ${limitText(queue.limit_gpus)}`;
}
