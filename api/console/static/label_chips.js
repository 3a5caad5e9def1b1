// Labels of jobs on pages: chips that lead to the jobs with the same label, and the dialog that edits them.

import { ask } from "./api.js";
import { toast } from "./dialogs.js";
import { el } from "./dom.js";
import { formDialog } from "./form_dialog.js";
import { field } from "./forms.js";
import { plural } from "./format.js";
import { addressOf, DEFAULTS } from "./job_query.js";
import { atLabelsField, labelChanges, labelsText, labelText, parseLabels, withRequirement } from "./label_text.js";

const HINT = "One label a line, such as team=vision.";
export const LABELS_FORM = "labels such as team=vision, separated by commas or lines";

/**
 * Links to the jobs with each label. `wanted`: filters to which a link adds its label; else it shows all jobs with it.
 * `shownMax`: number of chips before the rest is counted; these have keys without prefixes, to be short.
 * @param {Record<string, string>} labels
 * @param {{wanted?: Record<string, string>, shownMax?: number}} [options]
 */
export function labelChips(labels, { wanted, shownMax = Infinity } = {}) {
  const entries = Object.entries(labels);
  if (!entries.length) return null;
  const isShort = shownMax < Infinity;
  const base = wanted ?? { ...DEFAULTS, state: "" };
  const chip = ([key, value]) => {
    const href = addressOf({ ...base, selector: withRequirement(base.selector, key, value) });
    const text = labelText(isShort ? key.split("/").at(-1) : key, value);
    return el("li", {}, el("a", { href, class: "chip", title: `Jobs with ${labelText(key, value)}` }, text));
  };
  const rest = entries.slice(shownMax);
  const title = labelsText(Object.fromEntries(rest));
  const more = rest.length ? el("li", { class: "muted small", title }, `+${rest.length}`) : null;
  return el("ul", { class: "chips", "aria-label": "Labels" }, entries.slice(0, shownMax).map(chip), more);
}

/**
 * Lets the user edit the labels of a job. Only what the user changes is sent, so that other changes stay.
 * @param {any} job
 * @param {{acted: () => void}} options
 */
export async function editLabels(job, { acted }) {
  const rows = Math.min(12, Math.max(4, Object.keys(job.labels).length + 2));
  const value = labelsText(job.labels, "\n");
  const area = field("labels", "Labels", { kind: "area", wide: true, hint: HINT, value, rows, spellcheck: "false" });
  const send = (form) => sendLabels(job, form.elements.labels.value);
  const changed = await formDialog(`Labels of ${job.name}`, area, "Save labels", send);
  if (!changed) return;
  toast(changed.number ? `${plural(changed.number, "label")} of ${job.name} changed.` : "No label was changed.");
  acted();
}

async function sendLabels(job, text) {
  try {
    const labels = labelChanges(job.labels, parseLabels(text));
    const number = Object.keys(labels).length;
    if (number) await ask("PATCH", `/v1/jobs/${encodeURIComponent(job.id)}`, { body: { labels } });
    return { number };
  } catch (error) {
    const isMalformed = error instanceof SyntaxError;
    const own = { field: "labels", value: null, allowed: `${LABELS_FORM}; ${error.message}` };
    throw Object.assign(error, { errors: isMalformed ? [own] : atLabelsField(error.errors) });
  }
}
