// Secrets page: the secrets of a queue by name; set and delete. Values are never shown.

import { get } from "../api.js";
import { actionButton } from "../actions.js";
import { toast } from "../dialogs.js";
import { card, el, empty, redraw, table } from "../dom.js";
import { formDialog } from "../form_dialog.js";
import { count, plural } from "../format.js";
import { field } from "../forms.js";
import { filterForm, openWith, readFilters } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { lacksRole, may, whoAmI } from "../permissions.js";
import { putBytes } from "../raw_body.js";
import { when } from "../times.js";

const QUEUES_MAX = 1000;
const DEFAULT_QUEUE = "default";
const USUAL = { queue: "" };

export const title = () => "Secrets";

export async function show(root, { query, signal }) {
  const frame = new PageFrame(root, "Secrets");
  const [{ items }, who] = await Promise.all([get("/v1/queues", { query: { limit: QUEUES_MAX }, signal }), whoAmI()]);
  const names = [...new Set([DEFAULT_QUEUE, ...items.map((queue) => queue.name)])];
  const queues = names.filter((name) => may(who, "submitter", name));
  const wanted = readFilters(query, USUAL);
  const queue = wanted.queue || queues[0];
  frame.describe("Jobs of a queue name its secrets, and their workers receive the values. No page shows a value.");
  if (!queue) {
    frame.fill(() => card("Secrets", empty("No queue", "Listing secrets requires the role submitter on a queue.")));
    return;
  }
  const filters = [{ name: "queue", label: "Queue", options: queues.map((name) => [name, name]) }];
  const form = filterForm("Choose a queue", filters, { queue }, { changed: openWith("/secrets", USUAL) });
  const list = el("div");
  const disabledReason = lacksRole(who, "queue-admin", queue);
  const path = `/v1/queues/${encodeURIComponent(queue)}/secrets`;
  const refresh = async () => {
    const secrets = (await get(path, { signal })).items;
    frame.fill(() => [form, list]);
    frame.offer([{ name: "Set a secret", disabledReason, open: () => set(path, queue, "", () => again()) }], () => {});
    redraw(list, JSON.stringify(secrets), () =>
      contents(secrets, { path, queue, disabledReason, refused: frame.refused, again: () => again() }));
  };
  const again = keepUp(refresh, { signal, everyS: 30, wants: () => false, failed: frame.failed });
}

function contents(secrets, { path, queue, disabledReason, refused, again }) {
  if (!secrets.length) {
    const how = "Set one, then name it in the job document under ";
    return card(`Secrets of queue ${queue}`, empty("No secrets yet", el("p", {}, how, el("code", {}, "secrets"), ".")));
  }
  const row = (secret) => {
    const change = { name: "Change", disabledReason, open: () => set(path, queue, secret.name, again) };
    const remove = {
      name: "Delete",
      title: `Delete secret ${secret.name}?`,
      what: [`Jobs of queue ${queue} that need it wait from their next start on. Running jobs keep its value.`],
      method: "DELETE",
      path: `${path}/${encodeURIComponent(secret.name)}`,
      done: `Secret ${secret.name} is deleted.`,
      danger: true,
      disabledReason,
    };
    const options = { refused, acted: again };
    return [
      el("code", {}, secret.name),
      count(secret.version),
      when(secret.created_at_s),
      el("span", {}, when(secret.changed_at_s), ` by ${secret.changed_by}`),
      el("div", { class: "row" }, actionButton(change, options), actionButton(remove, options)),
    ];
  };
  const columns = [["Name"], ["Version", true], ["Created"], ["Changed"], [""]];
  return card([`Secrets of queue ${queue}`, el("span", { class: "small muted" }, plural(secrets.length, "secret"))],
    table("Secrets", columns, secrets.map(row)));
}

async function set(path, queue, name, again) {
  const content = el("div", { class: "form" },
    field("name", "Name", { value: name, readonly: Boolean(name), hint: "Lowercase letters, digits and -." }),
    field("body", "Value", { kind: "password", wide: true, hint: "6 to 65536 bytes. Encrypted before it is stored." }));
  const title = name ? `Change secret ${name}` : `Set a secret of queue ${queue}`;
  const made = await formDialog(title, content, name ? "Change" : "Set", (form) => {
    const given = Object.fromEntries([...new FormData(form)].map(([key, value]) => [key, String(value)]));
    return putBytes(`${path}/${encodeURIComponent(given.name.trim())}`, given.body);
  });
  if (!made) return;
  toast(`Secret ${made.name} is set.`);
  again();
}
