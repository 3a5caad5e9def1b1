// Node dialog: hardware, state, loan and jobs of a node.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, el, facts, put, table } from "../dom.js";
import { bytes, duration, gpus } from "../format.js";
import { loanGpus } from "../loan_gpus.js";
import { due, when } from "../times.js";

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
  const { loan, standby } = node;
  const jobs = Object.entries(node.jobs);
  const details = facts([
    ["Pool", node.pool],
    ["GPUs", `${node.gpus} × ${node.gpu}, ${bytes(node.gpu_memory_bytes)} each`],
    ["State", node.draining ? "draining" : node.cordoned ? "cordoned (unschedulable)" : node.state],
    ["Inference", node.inference_gpus ? gpus(node.inference_gpus) : "none"],
    ["Loan", loan && el("span", {}, badge(loan.state), `, ${loanGpus(loan)}, since `, when(loan.state_since_s))],
    ["Return by", loan?.return_by_s && due(loan.return_by_s)],
    ["Standby replicas", standby && describeStandby(standby)],
    ...node.prefetches.map((result) => [PURPOSES[result.purpose], describePrefetch(result)]),
  ]);
  const page = el("p", {}, el("a", { href: `#/nodes/${encodeURIComponent(node.name)}` }, "Open the page of the node"));
  const rows = jobs.map(([id, indices]) => [el("a", { href: `#/jobs/${id}` }, id), indices.join(", ")]);
  const none = el("p", { class: "muted" }, "No job uses this node.");
  return [details, rows.length ? table("Jobs on this node", [["Job"], ["GPUs"]], rows) : none, page];
}

const PHASES = {
  awake: "awake",
  asleep: "idle",
  absent: "absent",
  sleep_failed: "did not become idle",
  wake_failed: "did not serve again",
};

function describeStandby(standby) {
  const reason = standby.detail || standby.failure;
  const since = el("span", {}, badge(standby.phase, PHASES[standby.phase]), " since ", when(standby.since_s));
  return reason ? el("span", {}, since, `: ${reason}`) : since;
}

const PURPOSES = {
  training: "Images of jobs",
  serving: "Images of replicas",
  weights: "Weights",
};

function describePrefetch(result) {
  if (result.error) return el("span", {}, badge("failed"), ` after ${duration(result.seconds)}: ${result.error}`);
  return `loaded in ${duration(result.seconds)}`;
}
