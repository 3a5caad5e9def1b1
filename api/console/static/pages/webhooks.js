// Webhooks page: URLs that receive events; create one.

import { get } from "../api.js";
import { badge, card, el, empty, redraw, table } from "../dom.js";
import { plural } from "../format.js";
import { CursorPages } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { when } from "../times.js";
import { createWebhook } from "../webhook_actions.js";

const ROWS = 100;

export const title = () => "Webhooks";

export async function show(root, { signal }) {
  const frame = new PageFrame(root, "Webhooks");
  const list = el("div");
  const pages = new CursorPages("Pages of webhooks", () => again());
  frame.describe("The service posts events to these URLs, signed with a secret.");
  const refresh = async () => {
    const { items, next } = await get("/v1/webhooks", { query: { limit: ROWS, cursor: pages.cursor }, signal });
    frame.fill(() => [list, pages.place]);
    frame.offer([{ name: "Create a webhook", open: () => createWebhook(() => again()) }], () => again());
    redraw(list, JSON.stringify(items), () => contents(items));
    pages.update(next);
  };
  const again = keepUp(refresh, { signal, everyS: 15, wants: () => false, failed: frame.failed });
}

function contents(webhooks) {
  if (!webhooks.length) {
    const how = "Create one to receive events, such as failed jobs or recalls, in a chat or in your own service.";
    return card("No webhooks", empty("There are no webhooks yet", how));
  }
  const row = (webhook) => [
    el("a", { href: `#/webhooks/${webhook.id}` }, webhook.url),
    webhook.enabled ? badge("inference", "enabled") : badge("down", "disabled"),
    webhook.codes.length ? plural(webhook.codes.length, "event type") : "all",
    webhook.queue || "all",
    webhook.subject || "all",
    webhook.dead_in_a_row || "–",
    el("span", {}, when(webhook.created_at_s), ` by ${webhook.owner}`),
  ];
  const columns = [["URL"], ["State"], ["Events"], ["Queue"], ["Subject"], ["Given up in a row", true], ["Created"]];
  return el("section", { class: "card", "aria-label": "Webhooks" }, table("Webhooks", columns, webhooks.map(row)));
}
