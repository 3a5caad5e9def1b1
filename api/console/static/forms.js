// Form fields with their labels and hints, and what the API refuses beside the field that it is about.

import { problemNote } from "./dialogs.js";
import { el, put } from "./dom.js";

/** A labelled field. `kind`: text, number, or area; `path`: its name in the request's document. */
export function field(path, label, { hint = "", kind = "text", value = "", list, wide = false, ...more } = {}) {
  const id = `field-${path.replaceAll(".", "-")}`;
  const described = `${id}-hint`;
  const common = { id, name: path, "aria-describedby": described, ...more };
  const step = kind === "number" ? "any" : null;
  const line = () => el("input", { ...common, type: kind, value, list, step, autocomplete: "off" });
  const input = kind === "area" ? el("textarea", common, value) : line();
  const below = el("small", { id: described, data: { hint } }, hint);
  return el("div", { class: wide ? "field wide" : "field" }, el("label", { for: id }, label), input, below);
}

/** What a form holds, without what was left empty; numbers as numbers. */
export function values(form) {
  const told = {};
  for (const input of form.querySelectorAll("input[name], textarea[name], select[name]")) {
    const isGiven = input.type === "checkbox" ? input.checked : input.value.trim();
    if (isGiven) told[input.name] = input.type === "number" ? Number(input.value) : input.value.trim();
  }
  return told;
}

/** Puts each refusal beside its field, and the rest into `place`. The first refused field gets the focus. */
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
    hint.textContent = `${got(refused.value)}Allowed: ${refused.allowed}`;
    hint.classList.add("wrong");
  }
  const refusedOnly = (error.errors || []).length > 0 && strange.length === 0;
  const said = "Some fields are refused; what is allowed stands below each.";
  put(place, refusedOnly ? el("p", { class: "note bad", role: "alert" }, said) : problemNote(error));
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

/** Models and GPU models that the solver knows, as lists that fields may offer. */
export async function nameLists() {
  names ??= await (await fetch(new URL("names.json", import.meta.url))).json();
  const list = (id, of) => el("datalist", { id }, of.map((value) => el("option", { value })));
  return [list("models", names.models), list("gpu-models", names.gpus)];
}
