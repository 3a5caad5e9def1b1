// Questions to the person in front of the screen: a token, a confirmation; and answers in passing.

import { el, put } from "./dom.js";
import { plural } from "./format.js";

const NEWS_MAX = 20;
const NEWS_TOGETHER_MS = 1000;
const news = new Map();
let dialogs = 0;

/** Shows `content` in a modal dialog, and gives the value of the button that was pressed ("" for Esc). */
function modal(title, content, buttons) {
  dialogs += 1; // one may be asked for while another is open
  const heading = el("h2", { id: `dialog-title-${dialogs}` }, title);
  const form = el("form", { method: "dialog" }, heading, content, el("div", { class: "row" }, buttons));
  const dialog = el("dialog", { "aria-labelledby": heading.id }, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

/** Whether the person confirms what is going to happen. `what`: paragraphs that say it. */
export async function confirmed(title, what, { action, danger = false }) {
  const text = el("div", { class: "stack" }, what.map((line) => (typeof line === "string" ? el("p", {}, line) : line)));
  const no = el("button", { value: "", autofocus: true }, "Leave it");
  const yes = el("button", { value: "yes", class: danger ? "danger" : "first" }, action);
  return (await modal(title, text, [no, yes])) === "yes";
}

/** A token, once somebody gives one. `why`: what was wrong with the last. */
export async function askToken(why) {
  const plain = { type: "password", autocomplete: "off", spellcheck: "false" };
  const input = el("input", { id: "token", ...plain, required: true, autofocus: true });
  const hint = "It stays in this tab until that is closed. An administrator makes one with: ebbtide token create";
  const field = el(
    "div",
    { class: "field" },
    el("label", { for: "token" }, "Token"),
    input,
    el("small", {}, hint),
    why && el("p", { class: "wrong", role: "alert" }, why),
  );
  for (;;) {
    await modal("Who is asking?", field, [el("button", { value: "yes", class: "first" }, "Go on")]);
    if (input.value.trim()) return input.value.trim();
  }
}

/** Something that was done, in passing. */
export function toast(text) {
  const shown = el("p", { class: "toast" }, text);
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), 6000);
}

/** News for those who cannot see them, without moving the focus. Of a crowd of one kind, the first and how many. */
export function announce(kind, text) {
  if (!news.size) setTimeout(tellNews, NEWS_TOGETHER_MS);
  news.set(kind, [...(news.get(kind) ?? []), text]);
}

function tellNews() {
  const place = document.getElementById("news");
  for (const [first, ...others] of news.values()) {
    place.append(el("p", {}, others.length ? `${first}; and ${plural(others.length, "more change")} like it` : first));
  }
  news.clear();
  while (place.children.length > NEWS_MAX) place.firstChild.remove();
}

/** An error as people read it: what the API said, and the refused fields with what they may be. */
export function problemNote(error) {
  const told = (each) => el("li", {}, `${each.field}: got ${shown(each.value)}; allowed: ${each.allowed}`);
  const refused = (error.errors || []).map(told);
  return el(
    "div",
    { class: "note bad", role: "alert" },
    el("strong", {}, error.title || "That did not work"),
    el("p", {}, refused.length ? "" : error.message),
    refused.length ? el("ul", {}, refused) : null,
  );
}

export function showProblem(place, error) {
  put(place, problemNote(error));
}

function shown(value) {
  return value === null || value === undefined ? "nothing" : String(value);
}
