// Levers of a node and of its loan.

import { act } from "./actions.js";
import { ask } from "./api.js";
import { confirm, toast } from "./dialogs.js";
import { el } from "./dom.js";
import { formDialog } from "./form_dialog.js";
import { duration, plural } from "./format.js";
import { field, values } from "./forms.js";
import { formatIndices, parseIndices } from "./loan_gpus.js";

/**
 * Returns the actions for a node. `poolKind`: "training" or "inference". `disabledReason`: why this user may not use
 * them.
 */
export function nodeActions(node, { poolKind, vetoS, disabledReason }) {
  const path = `/v1/nodes/${encodeURIComponent(node.name)}`;
  const jobs = Object.keys(node.jobs).length;
  const cordon = {
    name: "Cordon",
    title: `Cordon ${node.name}?`,
    what: [`Nothing new is scheduled on it. ${jobs ? `${plural(jobs, "job")} on it continue.` : ""}`.trim()],
    path: `${path}:cordon`,
    done: `${node.name} is cordoned.`,
  };
  const drain = {
    name: "Drain",
    title: `Drain ${node.name}?`,
    what: [
      "It is cordoned, and its jobs are moved away.",
      jobs ? `${plural(jobs, "job")} on it save and then move, shrink or stop.` : "No job uses it now.",
      node.loan ? "Its loan ends: the node is returned to inference." : null,
    ].filter(Boolean),
    path: `${path}:drain`,
    done: `${node.name} is being drained.`,
    danger: true,
  };
  const uncordon = {
    name: node.quarantine ? "Release from quarantine" : "Uncordon",
    title: node.quarantine ? `Release ${node.name} from quarantine?` : `Uncordon ${node.name}?`,
    what: [
      "Jobs can be scheduled on it again.",
      node.incidents.length ? `Its ${plural(node.incidents.length, "incident")} no longer count.` : null,
    ].filter(Boolean),
    path: `${path}:uncordon`,
    done: `${node.name} can be scheduled on again.`,
  };
  const lendable = {
    name: node.lendable ? "Exclude from lending" : "Allow lending",
    title: node.lendable ? `Exclude ${node.name} from lending?` : `Allow lending of ${node.name}?`,
    what: [node.lendable ? "It is not lent to training. If it is lent now, it is recalled." : "It can be lent again."],
    method: "PATCH",
    path,
    body: { lendable: !node.lendable },
    done: node.lendable ? `${node.name} is excluded from lending.` : `${node.name} can be lent.`,
  };
  const part = { name: "Set lendable GPUs", open: (options) => setLendableGpus(node, path, options) };
  const isClosed = node.cordoned || node.draining || node.quarantine;
  const actions = [
    node.loan?.state === "proposed" && vetoAction(node.loan, vetoS),
    isClosed ? uncordon : cordon,
    !node.draining && drain,
    poolKind === "inference" && lendable,
    poolKind === "inference" && node.gpus > 1 && part,
  ];
  return actions.filter(Boolean).map((action) => ({ ...action, disabledReason }));
}

/** Returns the action that rejects a proposed loan. `vetoS`: how long the node is not proposed again. */
export function vetoAction(loan, vetoS) {
  return { name: "Veto loan", open: (options) => veto(loan, vetoS, options) };
}

async function setLendableGpus(node, path, { acted }) {
  const last = node.gpus - 1;
  const hint = `Indices of 0 to ${last}, such as ${Math.ceil(node.gpus / 2)}-${last}. Empty: the whole node is lent.`;
  const input = field("lendable_gpus", "Lendable GPUs", { hint, value: formatIndices(node.lendable_gpus) });
  const note = el("p", { class: "muted" }, "A loan takes these GPUs, and inference serves from the others. A loan of " +
    "other GPUs is recalled. On Kubernetes, the label ebbtide.dev/lendable-gpus of the node decides.");
  const send = (form) => {
    const text = values(form).lendable_gpus ?? "";
    const indices = parseIndices(text);
    const refusal = { field: "lendable_gpus", value: text, allowed: "indices such as 4-7 or 0, 2" };
    if (!indices) throw Object.assign(new Error("The indices have another form."), { errors: [refusal] });
    return ask("PATCH", path, { body: { lendable_gpus: indices } });
  };
  const content = [note, el("div", { class: "form" }, input)];
  if (!(await formDialog(`Lendable GPUs of ${node.name}`, content, "Set lendable GPUs", send))) return;
  toast(`The lendable GPUs of ${node.name} are changed.`);
  await acted();
}

async function veto(loan, vetoS, { refused, acted }) {
  const input = el("input", { id: "veto-reason", maxlength: 500, autocomplete: "off" });
  const reason = el("div", { class: "field" }, el("label", { for: "veto-reason" }, "Reason"), input,
    el("small", {}, "Shown in the event and in the audit log."));
  const what = [`It stays with inference and is not proposed again for ${duration(vetoS)}.`, reason];
  if (!(await confirm(`Veto the loan of ${loan.node}?`, what, { action: "Veto loan" }))) return;
  const path = `/v1/loans/${encodeURIComponent(loan.id)}:veto`;
  const done = `The loan of ${loan.node} is vetoed.`;
  await act({ method: "POST", path, body: { reason: input.value.trim() }, done }, { refused, acted });
}
