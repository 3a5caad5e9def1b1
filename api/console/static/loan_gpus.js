// GPUs of loans and nodes as text: numbers of GPUs, and indices such as 0–2, 5. Without a document.

import { count, gpus } from "./format.js";

/**
 * Formats ascending indices with their ranges: 0–2, 5.
 * @param {number[]} indices
 */
export function formatIndices(indices) {
  /** @type {[number, number][]} */
  const runs = [];
  for (const index of indices) {
    const last = runs.at(-1);
    if (last && index === last[1] + 1) last[1] = index;
    else runs.push([index, index]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

/**
 * Reads indices such as "4-7" or "0, 2", ascending; none from an empty text. Null if the text has another form.
 * @param {string} text
 * @returns {number[] | null}
 */
export function parseIndices(text) {
  if (!text.trim()) return [];
  const found = new Set();
  for (const part of text.split(",")) {
    const match = /^\s*(\d{1,4})(?:\s*[-–]\s*(\d{1,4}))?\s*$/.exec(part);
    if (!match) return null;
    const [first, last] = [Number(match[1]), Number(match[2] ?? match[1])];
    if (first > last) return null;
    for (let index = first; index <= last; index += 1) found.add(index);
  }
  return [...found].sort((a, b) => a - b);
}

/**
 * Describes the GPUs of a loan: 8 GPUs, or 4 of 8 GPUs for a part of a node. A dash if they are unknown.
 * @param {{gpus: number, node_gpus: number | null, indices: number[]}} loan
 */
export function loanGpus(loan) {
  if (!loan.gpus) return "–";
  return loan.indices.length && loan.node_gpus ? `${count(loan.gpus)} of ${gpus(loan.node_gpus)}` : gpus(loan.gpus);
}

/**
 * Returns the use of the GPUs of a node that no job holds, by index: lent, inference, free, or unknown where inference
 * or others use some of them. Inference reports how many GPUs it uses, but not which.
 * @param {{gpus: number, inference_gpus: number, other_gpus: number,
 *   loan: {state: string, indices: number[]} | null}} node
 * @param {Set<number>} held indices that jobs hold
 * @returns {Map<number, "lent" | "inference" | "free" | "unknown">}
 */
export function restUses(node, held) {
  const isLent = node.loan !== null && ["active", "recalled"].includes(node.loan.state);
  const onLoan = new Set(isLent ? node.loan?.indices : []);
  const rest = [...Array(node.gpus).keys()].filter((index) => !held.has(index));
  const serving = rest.filter((index) => !onLoan.has(index));
  const used = node.inference_gpus >= serving.length && node.inference_gpus ? "inference" : "unknown";
  const use = node.other_gpus ? "unknown" : node.inference_gpus ? used : "free";
  return new Map(rest.map((index) => [index, onLoan.has(index) ? "lent" : use]));
}
