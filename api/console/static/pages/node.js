// One node in a dialog: what it is, who uses it, on what terms it is lent.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, el, facts, put, table } from "../dom.js";
import { ago, bytes, gpus, time } from "../format.js";

export async function nodeDialog(name) {
  const body = el("div", { class: "stack" }, el("p", { class: "muted" }, "Loading …"));
  const close = el("div", { class: "row" }, el("button", { value: "" }, "Close"));
  const form = el("form", { method: "dialog" }, el("h2", { id: "node-title" }, `Node ${name}`), body, close);
  const dialog = el("dialog", { "aria-labelledby": "node-title" }, form);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target.closest("a") && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  try {
    put(body, contents(await get(`/v1/nodes/${encodeURIComponent(name)}`)));
  } catch (error) {
    put(body, problemNote(error));
  }
}

function contents(node) {
  const { loan } = node;
  const jobs = Object.entries(node.jobs);
  const told = facts([
    ["Pool", node.pool],
    ["GPUs", `${node.gpus} × ${node.gpu}, ${bytes(node.gpu_memory_bytes)} each`],
    ["State", node.draining ? "being drained" : node.cordoned ? "cordoned: takes nothing new" : node.state],
    ["Inference", node.inference_gpus ? gpus(node.inference_gpus) : "none"],
    ["Loan", loan && badge(loan.state, `${loan.state} since ${time(loan.state_since_s)}`)],
    ["Home by", loan?.return_by_s && `${time(loan.return_by_s)} (${ago(loan.return_by_s, Date.now() / 1000)})`],
  ]);
  const rows = jobs.map(([id, indices]) => [el("a", { href: `#/jobs/${id}` }, id), indices.join(", ")]);
  return [told, rows.length ? table("Jobs on this node", [["Job"], ["GPUs"]], rows) : el("p", { class: "muted" }, "No job holds a GPU of it.")];
}
