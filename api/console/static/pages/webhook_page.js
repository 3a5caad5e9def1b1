// Webhook page: its filter and state, and its deliveries, with levers.

import { get } from "../api.js";
import { actionButton } from "../actions.js";
import { badge, el, empty, facts } from "../dom.js";
import { plural, words } from "../format.js";
import { addressOf, CursorPages, filterForm, openWith, readFilters } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { documentText } from "../records.js";
import { due, when } from "../times.js";
import { redeliverAction, webhookActions } from "../webhook_actions.js";

const ROWS = 50;
const USUAL = { state: "" };
const STATES = [["", "All"], ["pending", "Pending"], ["delivered", "Delivered"], ["dead", "Given up"]];

export const title = (id) => `Webhook ${id}`;

export async function show(root, { params, query, signal }) {
  const [id] = params;
  const wanted = readFilters(query, USUAL);
  const path = `/webhooks/${encodeURIComponent(id)}`;
  const frame = new PageFrame(root, "Webhook", { back: { href: "#/webhooks", name: "Webhooks" } });
  const filters = [{ name: "state", label: "State", options: STATES }];
  const form = filterForm("Filter deliveries", filters, wanted, { changed: openWith(path, USUAL) });
  const pages = new CursorPages("Pages of deliveries", () => again());
  const refresh = async () => {
    const read = { ...wanted, limit: ROWS, cursor: pages.cursor };
    const [webhook, { items, next }] = await Promise.all([
      get(`/v1${path}`, { signal }),
      get(`/v1${path}/deliveries`, { query: read, signal }),
    ]);
    frame.describe(webhook.url);
    frame.offer(webhookActions(webhook), () => again());
    const state = frame.section("State", webhook, () => stateFacts(webhook));
    const options = { refused: frame.refused, acted: () => again() };
    const sent = frame.section("Deliveries", [items, wanted], () => deliveries(items, id, wanted, options));
    frame.fill(() => [state, form, sent, pages.place]);
    pages.update(next);
  };
  const failed = frame.failedOrGone("#/webhooks");
  const again = keepUp(refresh, { signal, everyS: 3, wants: () => false, failed });
}

function stateFacts(webhook) {
  return [
    webhook.disabled_reason && el("p", { class: "note warn" }, webhook.disabled_reason),
    facts([
      ["URL", el("code", {}, webhook.url)],
      ["State", webhook.enabled ? badge("inference", "enabled") : badge("down", "disabled")],
      ["Events", webhook.codes.length ? webhook.codes.join(", ") : "all"],
      ["Queue", webhook.queue || "all"],
      ["Subject", webhook.subject || "all"],
      ["Veto of loans", webhook.may_veto ? "its response may veto a proposed loan" : "no"],
      ["Given up in a row", webhook.dead_in_a_row ? plural(webhook.dead_in_a_row, "message") : "none"],
      ["Old secret valid until", webhook.old_secret_until_s && due(webhook.old_secret_until_s)],
      ["Created", el("span", {}, when(webhook.created_at_s), ` by ${webhook.owner}`)],
    ]),
  ];
}

function deliveries(items, id, wanted, options) {
  if (!items.length) {
    const isFiltered = addressOf("", wanted, USUAL) !== "#";
    return isFiltered ? empty("No matching deliveries", "Choose another state.")
      : empty("No deliveries yet", "Send a test message, or wait for the next event.");
  }
  return el("ol", { class: "record" }, items.map((delivery) => entry(delivery, id, options)));
}

function entry(delivery, id, options) {
  const { state, status, attempts, error } = delivery;
  const word = state === "dead" ? "given up" : state;
  const answer = status === null ? "" : `, status ${status}`;
  const next = delivery.next_at_s !== null && el("span", {}, "; next attempt ", due(delivery.next_at_s));
  return el("li", {}, when(delivery.created_at_s), el("div", { class: "stack" },
    el("p", {}, el("strong", {}, words(delivery.code)), ` ${delivery.subject} `, badge(state, word),
      ` after ${plural(attempts, "attempt")}${answer}`, next),
    error && el("p", { class: "small" }, error),
    el("details", {}, el("summary", {}, `Message ${delivery.id}`),
      documentText(`Body of message ${delivery.id}`, parsedBody(delivery.body))),
    state === "dead" && el("p", {}, actionButton(redeliverAction(id, delivery), options))));
}

function parsedBody(body) {
  try {
    return JSON.parse(body);
  } catch {
    return body;
  }
}
