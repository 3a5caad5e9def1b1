// Levers of queues: create, change the quota, delete the declaration.

import { ask } from "./api.js";
import { toast } from "./dialogs.js";
import { el } from "./dom.js";
import { formDialog } from "./form_dialog.js";
import { field, values } from "./forms.js";

/**
 * Numbers of a quota: [field, label, hint, whether empty means no limit].
 * @type {[string, string, string, boolean][]}
 */
const QUOTA = [
  ["guaranteed_gpus", "Guaranteed GPUs", "Reserved for its jobs. Idle ones can be borrowed.", false],
  ["limit_gpus", "Limit in GPUs", "Of all its jobs together. Empty: no limit.", true],
  ["weight", "Weight", "Relative share of borrowed GPUs.", false],
  ["user_limit_gpus", "Limit per owner in GPUs", "Empty: no limit.", true],
  ["user_jobs_max", "Pending jobs per owner", "Empty: no limit.", true],
  ["priority_max", "Highest priority", "That submitters may give their jobs.", false],
];

/** Returns the action that creates a queue. */
export function createQueueAction(disabledReason) {
  return { name: "Create a queue", disabledReason, open: createQueue };
}

/** Returns the actions for a queue. The reasons say why this user may not use them. */
export function queueActions(queue, { changeReason, deleteReason }) {
  const notDeclared = `Queue ${queue.name} is not declared. Create it first.`;
  const change = {
    name: "Change quota",
    disabledReason: changeReason || (queue.declared ? "" : notDeclared),
    open: (options) => changeQuota(queue, options),
  };
  const remove = {
    name: "Delete",
    title: `Delete queue ${queue.name}?`,
    what: ["Its jobs stay, without its guarantee and under the limits of the queue default."],
    method: "DELETE",
    path: `/v1/queues/${encodeURIComponent(queue.name)}`,
    done: `Queue ${queue.name} is deleted.`,
    danger: true,
    disabledReason: deleteReason,
  };
  return queue.declared ? [change, remove] : [change];
}

function quotaFields(queue) {
  return QUOTA.map(([name, label, hint]) => field(name, label, { kind: "number", hint, value: queue?.[name] ?? "" }));
}

/** Returns the quota in the form. An empty limit is null; other empty fields are left out. */
function readQuota(form) {
  const given = values(form);
  const limits = QUOTA.filter(([name, , , isLimit]) => isLimit && !(name in given)).map(([name]) => [name, null]);
  return { ...Object.fromEntries(limits), ...given };
}

async function createQueue({ acted }) {
  const name = field("name", "Name", { hint: "Lowercase letters, digits and -.", required: true });
  const send = (form) => ask("POST", "/v1/queues", { body: readQuota(form) });
  const content = el("div", { class: "form" }, name, quotaFields(null));
  const made = await formDialog("Create a queue", content, "Create", send);
  if (!made) return;
  toast(`Queue ${made.name} is created.`);
  acted();
}

async function changeQuota(queue, { acted }) {
  const note = el("p", { class: "muted" }, "A lower limit stops starts and growth. It ends no job.");
  const path = `/v1/queues/${encodeURIComponent(queue.name)}`;
  const send = (form) => ask("PATCH", path, { body: readQuota(form) });
  const content = [note, el("div", { class: "form" }, quotaFields(queue))];
  if (!(await formDialog(`Change the quota of ${queue.name}`, content, "Change quota", send))) return;
  toast(`The quota of queue ${queue.name} is changed.`);
  acted();
}
