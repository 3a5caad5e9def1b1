// Form fields with labels and hints, and the API's errors next to the fields they name.

import { problemNote } from "./dialogs.js";
import { el, put } from "./dom.js";

/**
 * `kind`: text, number, file or area; `options`: the values of a menu, as [value, text]; `list`: the ID of a list of
 * suggestions; `wide`: whether it takes a row of its own; `scope`: prefix of its ID on a page
 * with several forms. Others are attributes of the input.
 * @typedef {{hint?: string, kind?: string, value?: string | number, list?: string, options?: string[][],
 * wide?: boolean, scope?: string, [attribute: string]: unknown}} FieldOptions
 */

/**
 * A labelled field.
 * @param {string} path its name in the request document
 * @param {string} label
 * @param {FieldOptions} [options]
 */
export function field(path, label, { hint = "", kind = "text", value = "", list, options, wide, scope, ...more } = {}) {
  const id = `${scope ?? "field"}-${path.replaceAll(".", "-")}`;
  const described = `${id}-hint`;
  const common = { id, name: path, "aria-describedby": described, ...more };
  const step = kind === "number" ? "any" : null;
  const line = () => el("input", { ...common, type: kind, value, list, step, autocomplete: "off" });
  const menu = () => el("select", common, options.map(([each, text]) => el("option", { value: each }, text)));
  const input = options ? menu() : kind === "area" ? el("textarea", common, value) : line();
  const below = el("small", { id: described, data: { hint } }, hint);
  return el("div", { class: wide ? "field wide" : "field" }, el("label", { for: id }, label), input, below);
}

/**
 * Returns the values of a form without empty fields. Numbers are converted.
 * @returns {Record<string, any>}
 */
export function values(form) {
  const result = {};
  for (const input of form.querySelectorAll("input[name], textarea[name], select[name]")) {
    const isGiven = input.type === "checkbox" ? input.checked : input.value.trim();
    if (isGiven) result[input.name] = input.type === "number" ? Number(input.value) : input.value.trim();
  }
  return result;
}

/** Shows each field error next to its field and the others in `place`. Focuses the first invalid field. */
export function showRefusals(form, place, error) {
  clearRefusals(form, place);
  const strange = [];
  for (const refused of error.errors || []) {
    const input = form.querySelector(`[name="${CSS.escape(refused.field)}"]`);
    if (!input) {
      strange.push(refused);
      continue;
    }
    input.setAttribute("aria-invalid", "true");
    const hint = document.getElementById(input.getAttribute("aria-describedby"));
    hint.textContent = `${got(refused.value)}Accepted: ${refused.allowed}`;
    hint.classList.add("wrong");
  }
  const refusedOnly = (error.errors || []).length > 0 && strange.length === 0;
  const message = "Some fields are invalid. The accepted values are shown below each field.";
  put(place, refusedOnly ? el("p", { class: "note bad", role: "alert" }, message) : problemNote(error));
  form.querySelector('[aria-invalid="true"]')?.focus();
}

function got(value) {
  const isPlain = ["string", "number"].includes(typeof value) && String(value).length < 60;
  return isPlain ? `Got ${JSON.stringify(value)}. ` : "";
}

export function clearRefusals(form, place) {
  put(place);
  for (const input of form.querySelectorAll('[aria-invalid="true"]')) {
    input.removeAttribute("aria-invalid");
    const hint = document.getElementById(input.getAttribute("aria-describedby"));
    hint.textContent = hint.dataset.hint;
    hint.classList.remove("wrong");
  }
}

let names = null;

/** Returns datalists of the models and GPU models that the solver knows. */
export async function nameLists() {
  names ??= await (await fetch(new URL("names.json", import.meta.url))).json();
  const list = (id, of) => el("datalist", { id }, of.map((value) => el("option", { value })));
  return [list("models", names.models), list("gpu-models", names.gpus)];
}
