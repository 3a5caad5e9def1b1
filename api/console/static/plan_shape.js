// GPU slices of a plan request: several GPU models as groups of equal nodes. Pure.

const GPUS_PER_NODE = 8;
export const MODELS_MAX = 4;

/** @typedef {{gpu: string, gpus: number}} Slice */

/**
 * Returns the groups of nodes of the slices: nodes of 8 GPUs, and one smaller node for the rest.
 * @param {Slice[]} slices
 */
export function groupsOf(slices) {
  return slices.flatMap(({ gpu, gpus }) => {
    const nodes = Math.floor(gpus / GPUS_PER_NODE);
    const rest = gpus % GPUS_PER_NODE;
    return [
      ...(nodes ? [{ gpu, nodes, gpusPerNode: GPUS_PER_NODE }] : []),
      ...(rest ? [{ gpu, nodes: 1, gpusPerNode: rest }] : []),
    ];
  });
}

/**
 * Formats slices for an address: a100-80g:8,h100-80g:16.
 * @param {Slice[]} slices
 */
export function slicesText(slices) {
  return slices.map(({ gpu, gpus }) => `${gpu}:${gpus}`).join(",");
}

/**
 * Parses slices of an address. Ignores what is malformed.
 * @param {string} text
 * @returns {Slice[]}
 */
export function parseSlices(text) {
  const found = text.split(",").map((each) => each.split(":"));
  return found
    .filter(([gpu, gpus]) => gpu && /^\d+$/.test(gpus ?? ""))
    .map(([gpu, gpus]) => ({ gpu, gpus: Number(gpus) }))
    .slice(0, MODELS_MAX - 1);
}

/**
 * Returns the request for a plan on all slices. One slice is a plain number of GPUs.
 * @param {Record<string, any>} question with `gpu` and `gpus`, the first slice
 * @param {Slice[]} more
 */
export function requestOf({ gpu, gpus, ...others }, more) {
  if (!more.length) return { ...others, gpu, gpus };
  return { ...others, shape: groupsOf([{ gpu, gpus }, ...more]) };
}

/**
 * Returns the powers of two from `least` to `most`, and both ends.
 * @param {number} most
 * @param {number} [least]
 */
export function counts(most, least = 1) {
  const found = [least];
  for (let number = 1; number < most; number *= 2) if (number > least) found.push(number);
  return most > least ? [...found, most] : found;
}
