// Node page: state and use of a node, its jobs, loans, agent, hardware and history, with levers.

import { get } from "../api.js";
import { badge, el, empty, facts, figureOf, table } from "../dom.js";
import { bytes, count, duration, figure, gpus, plural, words } from "../format.js";
import { keepUp } from "../live.js";
import { formatIndices, loanGpus, restUses } from "../loan_gpus.js";
import { nodeActions } from "../node_actions.js";
import { PageFrame } from "../page_frame.js";
import { lacksRole, whoAmI } from "../permissions.js";
import { eventRecord } from "../records.js";
import { age, due, when } from "../times.js";

const EVENTS = 40;
const LOANS = 10;
const GIGABIT = 1e9;
const STATIC_EVERY_MS = 30_000; // hardware and agent change rarely

export const title = (name) => `Node ${name}`;

export async function show(root, { params, signal }) {
  const page = new NodePage(root, params[0], signal);
  const wants = (event) => event.subject === page.name || page.jobs.has(event.subject);
  page.again = keepUp(() => page.refresh(), { signal, wants, failed: page.frame.failed });
}

class NodePage {
  again = async () => {}; // set once the page refreshes itself

  constructor(root, name, signal) {
    this.name = name;
    this.signal = signal;
    this.frame = new PageFrame(root, `Node ${name}`, { back: { href: "#/nodes", name: "Nodes" } });
    this.figures = el("div");
    this.jobs = new Set();
    this.readAtMs = -Infinity;
  }

  async refresh() {
    const read = (path, query = {}) => get(path, { query, signal: this.signal });
    const node = await read(`/v1/nodes/${encodeURIComponent(this.name)}`);
    const [pool, loans, events, who] = await Promise.all([
      read(`/v1/pools/${encodeURIComponent(node.pool)}`),
      read("/v1/loans", { node: node.name, limit: LOANS }),
      read("/v1/events", { subject: node.name, order: "newest", limit: EVENTS }),
      whoAmI(),
      this.#readHardware(node),
    ]);
    this.jobs = new Set(Object.keys(node.jobs));
    const disabledReason = lacksRole(who, "admin");
    const vetoS = pool.lending?.veto_s ?? 0;
    this.frame.offer(nodeActions(node, { poolKind: pool.kind, vetoS, disabledReason }), () => this.again());
    this.#draw(node, pool, loans.items, events.items);
  }

  async #readHardware(node) {
    if (performance.now() - this.readAtMs < STATIC_EVERY_MS) return;
    const [hosts, profile] = await Promise.all([
      get("/v1/machines", { query: { node: node.name }, signal: this.signal }),
      get(`/v1/hardware/gpus/${encodeURIComponent(node.gpu)}`, { signal: this.signal }).catch(() => null),
    ]);
    const machine = hosts.items[0];
    const path = machine && `/v1/machines/${encodeURIComponent(machine.name)}`;
    this.machine = machine ? await get(path, { signal: this.signal }) : null;
    this.profile = profile;
    this.readAtMs = performance.now();
  }

  #draw(node, pool, loans, events) {
    const { frame } = this;
    const figures = useFigures(node);
    if (figures.textContent !== this.figures.textContent) this.figures.replaceChildren(figures);
    const cards = [
      frame.section("GPUs", [node.jobs, node.gpus, node.inference_gpus, node.other_gpus, node.loan],
        () => gpuSlots(node)),
      frame.section("State", [node, pool.kind], () => stateFacts(node, pool)),
      frame.section("Incidents", node.incidents, () => incidentTable(node.incidents)),
      frame.section("Loans", [loans, pool.kind], () => pool.kind === "inference" && loanTable(loans)),
      frame.section("Agent", this.machine, () => agentFacts(this.machine)),
      frame.section("Hardware", [node.gpu, this.machine, this.profile], () => this.#hardware(node)),
      frame.section("History", events, () => eventRecord(events, "Changes of the node and its loans appear here.")),
    ];
    const [slots, state, incidents, lent, agent, hardware, history] = cards;
    frame.fill(() => [this.figures, slots, el("div", { class: "halves" }, state, agent), incidents, lent,
      el("div", { class: "halves" }, hardware, history)]);
  }

  #hardware(node) {
    return hardwareFacts(node, this.machine?.inventory, this.profile);
  }
}

function useFigures(node) {
  const held = heldGpus(node);
  const free = Math.max(0, node.gpus - held - node.inference_gpus - node.other_gpus);
  const jobs = Object.keys(node.jobs).length;
  const others = node.other_gpus > 0 && figureOf("idle", "Other use", count(node.other_gpus), "", "outside Ebbtide");
  return el("dl", { class: "figures" }, [
    node.loan?.indices.length > 0 && figureOf("lent", "On loan", count(node.loan.gpus), `of ${gpus(node.gpus)}`,
      node.loan.state === "active" ? `GPUs ${formatIndices(node.loan.indices)}` : node.loan.state),
    figureOf(node.loan ? "lent" : "training", "In training", count(held), `of ${gpus(node.gpus)}`, plural(jobs, "job")),
    figureOf("inference", "In inference", count(node.inference_gpus), `of ${gpus(node.gpus)}`, "as last observed"),
    others,
    figureOf("idle", "Free", count(free), free === 1 ? "GPU" : "GPUs", node.gpu),
  ].filter(Boolean));
}

function heldGpus(node) {
  return Object.values(node.jobs).reduce((sum, indices) => sum + indices.length, 0);
}

/** Draws each GPU with the job that holds it. */
function gpuSlots(node) {
  const jobOf = new Map(Object.entries(node.jobs).flatMap(([id, indices]) => indices.map((index) => [index, id])));
  const held = node.loan ? "lent" : "training";
  const rest = restUses(node, new Set(jobOf.keys()));
  const slot = (index) => {
    const id = jobOf.get(index);
    const [state, word] = REST_WORDS[rest.get(index) ?? "unknown"];
    const what = id ? jobLink(id) : el("span", {}, node.other_gpus && state === "idle" ? "not in training" : word);
    return el("li", { data: { state: id ? held : state } }, el("small", {}, `GPU ${index}`), what);
  };
  return el("ol", { class: "slots", "aria-label": "GPUs and the jobs that hold them" },
    [...Array(node.gpus).keys()].map(slot));
}

/** State and name of GPUs that no job holds, by use. */
const REST_WORDS = {
  lent: ["idle", "on loan, free"],
  inference: ["inference", "inference"],
  free: ["idle", "free"],
  unknown: ["idle", "inference or free"],
};

/** Links to a job. The API replaces the id of a job that the user may not read. */
function jobLink(id) {
  return id.includes("-") ? el("a", { href: `#/jobs/${id}`, title: id }, id) : el("span", {}, id);
}

function stateFacts(node, pool) {
  const { loan } = node;
  const schedulable = node.serves_training ? "jobs can start on it" : "no job can start on it now";
  const { lendable_gpus: indices } = node;
  const part = `${count(indices.length)} of ${gpus(node.gpus)}: ${formatIndices(indices)}`;
  const whole = indices.length ? part : "the whole node";
  const lendable = node.lendable ? whole : "no, excluded by an admin";
  return [
    node.quarantine && el("p", { class: "note warn" }, `Quarantined: ${node.quarantine}`),
    facts([
      ["Pool", el("a", { href: `#/pools/${encodeURIComponent(node.pool)}` }, `${node.pool} (${pool.kind})`)],
      ["State", badge(node.state === "up" ? "inference" : "down", node.state)],
      ["Scheduling", node.draining ? "draining: its jobs move away" : node.cordoned ? "cordoned" : schedulable],
      ["Lendable", pool.kind === "inference" && lendable],
      ["Loan", loan && el("span", {}, badge(loan.state), `, ${loanGpus(loan)}, since `, when(loan.state_since_s))],
      ["Offered", loan?.state === "proposed" && due(loan.offered_at_s)],
      ["Return by", loan?.return_by_s && due(loan.return_by_s)],
    ]),
  ];
}

function incidentTable(incidents) {
  if (!incidents.length) return null;
  const row = (each) => [when(each.at_s), each.kind, jobLink(each.job_id), each.confirmed ? "yes" : "no", each.detail];
  const columns = [["Time"], ["Kind"], ["Job"], ["Counts toward quarantine"], ["Evidence"]];
  return table("Jobs that the node failed or slowed in the last day", columns, [...incidents].reverse().map(row));
}

function loanTable(loans) {
  if (!loans.length) {
    return empty("Never lent", "The node is lent when the forecast shows that inference does not need it.");
  }
  const endOf = (loan) => (loan.is_live ? Date.now() / 1000 : loan.state_since_s);
  const lentFor = (loan) => loan.lent_at_s && duration(Math.round(endOf(loan) - loan.lent_at_s));
  const row = (loan) => [
    when(loan.offered_at_s),
    badge(loan.state),
    loanGpus(loan),
    loan.lent_at_s ? when(loan.lent_at_s) : "–",
    loan.recalled_at_s ? when(loan.recalled_at_s) : "–",
    loan.is_live ? "–" : when(loan.state_since_s),
    lentFor(loan) || "–",
    loan.receipt?.outcome ? badge(loan.receipt.outcome, words(loan.receipt.outcome.replace("_", " "))) : "–",
  ];
  const columns = [["Offered"], ["State"], ["Size"], ["Lent"], ["Recalled"], ["Ended"], ["Duration", true], ["Recall"]];
  return [
    table("Newest loans of the node", columns, loans.map(row)),
    el("p", { class: "small" }, el("a", { href: "#/loans" }, "All loans")),
  ];
}

function agentFacts(machine) {
  if (!machine) {
    const how = "The service itself, or its operator on Kubernetes, runs the jobs of this node.";
    return empty("No agent", how, el("p", {}, "Machines that run ", el("code", {}, "ebbtide agent"), " report here."));
  }
  const silent = "No report yet";
  return [
    machine.problem && el("p", { class: "note warn" }, machine.problem),
    machine.revoked_at_s && el("p", { class: "note bad" }, "Its credential was revoked: ", when(machine.revoked_at_s)),
    facts([
      ["Machine", machine.name],
      ["Last report", machine.seen_at_s ? age(machine.seen_at_s) : silent],
      ["Version", machine.agent_version],
      ["Address", machine.address],
      ["Isolation of ranks", machine.containment],
      ["Joined", when(machine.joined_at_s)],
      ["Temporary", machine.temporary && "yes: it is removed once it has left"],
    ]),
  ];
}

function hardwareFacts(node, inventory, profile) {
  const device = inventory?.gpus[0];
  const nics = inventory?.nics.map(({ name, speed_bits_per_s: speed }) =>
    speed ? `${name} (${figure(speed / GIGABIT)} Gbit/s)` : name);
  return facts([
    ["GPUs", `${node.gpus} × ${node.gpu}${node.estimated ? " (estimated profile)" : ""}`],
    ["GPU memory", `${bytes(node.gpu_memory_bytes)} each`],
    ["Product", device?.name],
    ["Power limit", device?.power_watts ? `${figure(device.power_watts)} W` : ""],
    ["NVLinks", device?.nvlinks || ""],
    ["PCIe", device?.pcie_generation ? `generation ${device.pcie_generation}, ${device.pcie_lanes} lanes` : ""],
    ["Within the node", profile && `${bytes(profile.intra_bandwidth_bytes_per_s)}/s per GPU and direction`],
    ["Between nodes", profile && `${bytes(profile.network.bandwidth_bytes_per_s)}/s`],
    ["Host memory", inventory?.memory_bytes ? bytes(inventory.memory_bytes) : ""],
    ["Processors", inventory?.cpus || ""],
    ["Network interfaces", nics?.join(", ")],
    ["Addresses", inventory?.addresses.join(", ")],
    ["Checkpoint folders", inventory?.checkpoint_paths.map(checkpointFolder).join(", ")],
  ]);
}

function checkpointFolder({ path, writable, free_bytes: free }) {
  return `${path} (${writable ? `${bytes(free)} free` : "not writable"})`;
}
