// Levers of webhooks: create, change, test, enable, rotate the secret, delete.

import { ask } from "./api.js";
import { confirm, problemNote } from "./dialogs.js";
import { el, put } from "./dom.js";
import { formDialog } from "./form_dialog.js";
import { field, values } from "./forms.js";
import { revealOnce } from "./secret_reveal.js";

const EVENTS_HINT = "Event types, separated by commas. Empty: all.";
const QUEUE_HINT = "Only events of this queue and its jobs. Empty: all, which only admins may choose.";
const KEPT = "Events are kept for it until it is enabled again.";
const CAUGHT_UP = "It gets all events since it was disabled.";

/** Asks for the fields of a webhook, creates it and shows its secret once. */
export async function createWebhook(acted) {
  const content = el("div", { class: "form" },
    field("url", "URL", { wide: true, placeholder: "https://hooks.example.com/ebbtide", required: true }),
    field("codes", "Events", { wide: true, placeholder: "JobStarted, NodeLent", hint: EVENTS_HINT }),
    field("queue", "Queue", { hint: QUEUE_HINT }),
    field("subject", "Subject", { hint: "Only events of this job id, node, pool or queue. Empty: all." }));
  const made = await formDialog("Create a webhook", content, "Create", (form) => {
    const { url = "", codes = "", queue, subject } = values(form);
    const list = codes.split(",").map((code) => code.trim()).filter(Boolean);
    return ask("POST", "/v1/webhooks", { body: { url, codes: list, queue: queue ?? null, subject: subject ?? null } });
  });
  if (!made) return;
  await revealOnce("Webhook created", "signing secret", made.secret);
  acted();
}

/** Returns the actions for a webhook. */
export function webhookActions(webhook) {
  const path = `/v1/webhooks/${encodeURIComponent(webhook.id)}`;
  const test = {
    name: "Send a test",
    title: "Send a test message?",
    what: [`A message with the code Test is sent to ${webhook.url} after all pending ones.`],
    path: `${path}:test`,
    done: "The test message is queued.",
    disabledReason: webhook.enabled ? "" : "The webhook is disabled. Enable it first.",
  };
  const enable = {
    name: webhook.enabled ? "Disable" : "Enable",
    title: webhook.enabled ? "Disable the webhook?" : "Enable the webhook?",
    what: [webhook.enabled ? KEPT : CAUGHT_UP],
    method: "PATCH",
    path,
    body: { enabled: !webhook.enabled },
    done: webhook.enabled ? "The webhook is disabled." : "The webhook is enabled.",
  };
  const rotate = { name: "Rotate secret", open: ({ refused, acted }) => rotateSecret(path, refused, acted) };
  const remove = {
    name: "Delete",
    title: "Delete the webhook?",
    what: [`No more messages are sent to ${webhook.url}. Its deliveries are deleted as well.`],
    method: "DELETE",
    path,
    done: "The webhook is deleted.",
    danger: true,
  };
  return [test, enable, rotate, remove];
}

async function rotateSecret(path, refused, acted) {
  const what = ["Messages are signed with a new secret. For one day they carry the old signature as well."];
  if (!(await confirm("Rotate the signing secret?", what, { action: "Rotate secret" }))) return;
  try {
    const changed = await ask("POST", `${path}:rotate-secret`);
    put(refused);
    await revealOnce("New signing secret", "signing secret", changed.secret);
    acted();
  } catch (error) {
    put(refused, problemNote(error));
  }
}

/** Returns the action that sends a dead message again. */
export function redeliverAction(webhookId, delivery) {
  const webhook = `/v1/webhooks/${encodeURIComponent(webhookId)}`;
  return {
    name: "Redeliver",
    title: "Send the message again?",
    what: ["It is sent before all later messages."],
    path: `${webhook}/deliveries/${encodeURIComponent(delivery.id)}:redeliver`,
    done: "The message is queued again.",
  };
}
