// Dialogs, toasts, screen reader announcements and error messages.

import { el, put } from "./dom.js";
import { plural } from "./format.js";

const NEWS_MAX = 20;
const NEWS_TOGETHER_MS = 1000;
const news = new Map();
let dialogs = 0;

/** Shows `content` in a modal dialog. Returns the value of the pressed button, "" for Esc or when `signal` aborts. */
function modal(title, content, buttons, signal) {
  dialogs += 1; // IDs must be unique: dialogs can be nested
  const heading = el("h2", { id: `dialog-title-${dialogs}` }, title);
  const form = el("form", { method: "dialog" }, heading, content, el("div", { class: "row" }, buttons));
  const dialog = el("dialog", { "aria-labelledby": heading.id }, form);
  document.body.append(dialog);
  dialog.showModal();
  signal?.addEventListener("abort", () => dialog.close(""));
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

/** Asks the user to confirm an action. `what`: paragraphs that describe its effect. A notice has only the action. */
export async function confirm(title, what, { action, danger = false, isNotice = false }) {
  const text = el("div", { class: "stack" }, what.map((line) => (typeof line === "string" ? el("p", {}, line) : line)));
  const no = el("button", { value: "", autofocus: true }, "Go back");
  const yes = el("button", { value: "yes", class: danger ? "danger" : "first" }, action);
  return (await modal(title, text, isNotice ? [yes] : [no, yes])) === "yes";
}

/**
 * Prompts until the user enters a token and returns it; null if the user chooses the identity provider `issuer` or
 * `signal` aborts. `why`: why the previous attempt failed.
 */
export async function askSignIn(why, { issuer, signal }) {
  const plain = { type: "password", autocomplete: "off", spellcheck: "false" };
  const input = el("input", { id: "token", ...plain, required: true, autofocus: !issuer });
  const command = el("code", {}, "ebbtide console");
  const hint = el("small", {}, "Or run ", command, " and open the URL that it prints. It needs no token.");
  const field = el("div", { class: "field" }, el("label", { for: "token" }, "Token"), input, hint);
  // No submit button: Enter in the token field would press it.
  const leave = ({ currentTarget }) => currentTarget.closest("dialog").close("oidc");
  const provider = { type: "button", class: "first wide", autofocus: true, on: { click: leave } };
  const content = el(
    "div",
    { class: "stack" },
    why && el("p", { class: "note bad", role: "alert" }, why),
    issuer && el("button", provider, `Continue with ${issuer}`),
    field,
  );
  for (;;) {
    const submit = el("button", { value: "yes", class: issuer ? "" : "first" }, "Sign in");
    const pressed = await modal("Sign in", content, [submit], signal);
    if (pressed === "oidc" || signal.aborted) return null;
    if (pressed === "yes" && input.value.trim()) return input.value.trim();
  }
}

/** Shows a short-lived message. */
export function toast(text) {
  const shown = el("p", { class: "toast" }, text);
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), 6000);
}

/** Announces news to screen readers without moving the focus. Groups news of one kind: the first and the count. */
export function announce(kind, text) {
  if (!news.size) setTimeout(tellNews, NEWS_TOGETHER_MS);
  news.set(kind, [...(news.get(kind) ?? []), text]);
}

function tellNews() {
  const place = document.getElementById("news");
  for (const [first, ...others] of news.values()) {
    place.append(el("p", {}, others.length ? `${first}; and ${plural(others.length, "similar change")}` : first));
  }
  news.clear();
  while (place.children.length > NEWS_MAX) place.firstChild.remove();
}

/** Renders an error: the message, and each invalid field with its value and the accepted values. */
export function problemNote(error) {
  const fieldItem = (each) => el("li", {}, `${each.field}: got ${shown(each.value)}; accepted: ${each.allowed}`);
  const refused = (error.errors || []).map(fieldItem);
  return el(
    "div",
    { class: "note bad", role: "alert" },
    el("strong", {}, error.title || "The request failed"),
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
