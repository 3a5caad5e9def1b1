// A form in a dialog, with the API's errors next to its fields.

import { clearRefusals, showRefusals } from "./forms.js";
import { el } from "./dom.js";

let dialogs = 0;

/**
 * Shows a form in a dialog until `send(form)` succeeds or the user leaves. Returns the response of `send`, or null.
 * After an error the dialog stays open with the entered values.
 * @param {string} title
 * @param {unknown} content
 * @param {string} action name of the button
 * @param {(form: HTMLFormElement) => Promise<any>} send
 */
export function formDialog(title, content, action, send) {
  dialogs += 1;
  const heading = el("h2", { id: `form-dialog-${dialogs}` }, title);
  const refused = el("div");
  const leave = el("button", { type: "button", on: { click: () => dialog.close() } }, "Go back");
  const confirm = el("button", { type: "submit", class: "first" }, action);
  const buttons = el("div", { class: "row" }, leave, confirm);
  const form = el("form", { method: "dialog", novalidate: true }, heading, content, refused, buttons);
  const dialog = /** @type {HTMLDialogElement} */ (el("dialog", { "aria-labelledby": heading.id }, form));
  let response = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (confirm.disabled) return;
    confirm.disabled = true;
    clearRefusals(form, refused);
    try {
      response = await send(form);
      dialog.close();
    } catch (error) {
      showRefusals(form, refused, error);
    }
    confirm.disabled = false;
  });
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(response);
    });
  });
}
