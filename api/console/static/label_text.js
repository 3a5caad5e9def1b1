// Labels of jobs as text: what users type into forms and filters, and what tables and files show.

/** @typedef {Record<string, string>} Labels */

/**
 * @param {string} key
 * @param {string} value
 */
export function labelText(key, value) {
  return `${key}=${value}`;
}

/**
 * Returns labels as text, in the order of their keys.
 * @param {Labels} labels
 * @param {string} [separator]
 */
export function labelsText(labels, separator = ", ") {
  const entries = Object.entries(labels).sort(([one], [other]) => (one < other ? -1 : 1));
  return entries.map(([key, value]) => labelText(key, value)).join(separator);
}

/**
 * Reads labels that are separated by commas or lines, each as `key=value`. The API checks keys and values.
 * @param {string} text
 * @returns {Labels}
 * @throws {SyntaxError} a label has no equals sign, or a key is there twice
 */
export function parseLabels(text) {
  /** @type {Labels} */
  const labels = {};
  for (const part of text.split(/[,\n]/).map((each) => each.trim()).filter(Boolean)) {
    const at = part.indexOf("=");
    if (at < 1) throw new SyntaxError(`${JSON.stringify(part)} has no key and value`);
    const key = part.slice(0, at).trim();
    if (Object.hasOwn(labels, key)) throw new SyntaxError(`${JSON.stringify(key)} is there twice`);
    labels[key] = part.slice(at + 1).trim();
  }
  return labels;
}

/**
 * Returns the changes that turn `before` into `after`; null removes a label.
 * @param {Labels} before
 * @param {Labels} after
 * @returns {Record<string, string | null>}
 */
export function labelChanges(before, after) {
  const keys = Object.keys({ ...before, ...after }).filter((key) => before[key] !== after[key]);
  return Object.fromEntries(keys.map((key) => [key, after[key] ?? null]));
}

/**
 * Returns the label selector with another requirement, unless it has it already.
 * @param {string} selector
 * @param {string} key
 * @param {string} value
 */
export function withRequirement(selector, key, value) {
  const added = labelText(key, value);
  const parts = selector.split(",").map((part) => part.trim()).filter(Boolean);
  return parts.includes(added) ? selector : [selector.trim(), added].filter(Boolean).join(",");
}

/**
 * Returns the API's errors with those about single labels at the field `labels`, which forms have for all of them.
 * @param {{field: string, value: unknown, allowed: string}[]} [errors]
 */
export function atLabelsField(errors = []) {
  return errors.map((each) => (each.field.startsWith("labels.") ? { ...each, field: "labels" } : each));
}
