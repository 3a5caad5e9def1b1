// Lines of logs that contain a text, and the text of a downloaded log. Pure, without a document.

/** @typedef {{generation: number, rank: number, text: string}} Line */

/**
 * Returns a function that tells whether a line contains the text, in any case; null for an empty text.
 * @param {string} text
 * @returns {((line: Line) => boolean) | null}
 */
export function lineMatcher(text) {
  const wanted = text.trim().toLowerCase();
  return wanted ? (line) => line.text.toLowerCase().includes(wanted) : null;
}

/**
 * Splits a line into parts: [text, whether it matches].
 * @param {string} line
 * @param {string} text
 * @returns {[string, boolean][]}
 */
export function markedParts(line, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [[line, false]];
  const lowered = line.toLowerCase();
  /** @type {[string, boolean][]} */
  const parts = [];
  let from = 0;
  for (let at = lowered.indexOf(wanted); at >= 0; at = lowered.indexOf(wanted, from)) {
    if (at > from) parts.push([line.slice(from, at), false]);
    parts.push([line.slice(at, at + wanted.length), true]);
    from = at + wanted.length;
  }
  if (from < line.length) parts.push([line.slice(from), false]);
  return parts;
}

/**
 * Returns lines as text, with a heading before each run.
 * @param {Line[]} lines
 */
export function logText(lines) {
  let generation = null;
  return lines.map((line) => {
    const heading = line.generation === generation ? "" : `--- run ${line.generation}, rank ${line.rank}\n`;
    generation = line.generation;
    return `${heading}${line.text}\n`;
  }).join("");
}
