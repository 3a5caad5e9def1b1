// Nodes page: all nodes with their state and use, with filters, sort order and pages.

import { badge, bar, card, el, empty, redraw } from "../dom.js";
import { STATES } from "../fleet_grid.js";
import { FleetNodes, filterNodes } from "../fleet_nodes.js";
import { count, gpus, plural } from "../format.js";
import { addressOf, filterForm, pageButtons, readFilters, sortableTable, sortRows } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";

const ROWS = 100;
const USUAL = { name: "", pool: "", state: "", gpu: "", sort: "name", page: "1" };
const USED = { training: "training", lent: "lent", recalled: "recalled" };
const ADD = "ebbtide nodes add t0 --pool training --gpu a100-80g --gpus 8";
const COLUMNS = [
  { key: "name", name: "Node", value: (node) => node.name },
  { key: "state", name: "State", value: (node) => node.state },
  { key: "pool", name: "Pool", value: (node) => node.pool },
  { key: "gpu", name: "GPU model", value: (node) => node.gpu },
  { key: "gpus", name: "GPUs", isNumber: true, value: (node) => node.gpus },
  { key: "used", name: "In use", isNumber: true, value: (node) => node.held + node.inference },
  { key: "use", name: "" },
];

export const title = () => "Nodes";

export async function show(root, { query, signal }) {
  const page = new NodesPage(root, query, signal);
  const wants = (event) => /^(Node|Loan|Pool)/.test(event.code);
  keepUp(() => page.refresh(), { signal, wants, failed: page.frame.failed });
}

class NodesPage {
  constructor(root, query, signal) {
    this.signal = signal;
    this.wanted = readFilters(query, USUAL);
    this.fleet = new FleetNodes();
    this.frame = new PageFrame(root, "Nodes");
    this.form = el("div");
    this.list = el("div", { class: "stack" });
  }

  async refresh() {
    await this.fleet.refresh(this.signal);
    this.frame.fill(() => [this.form, this.list]);
    const nodes = [...this.fleet.nodes.values()];
    const choices = ["pool", "state", "gpu"].map((name) => [...new Set(nodes.map((node) => node[name]))].sort());
    redraw(this.form, JSON.stringify(choices), () => this.#filters(choices));
    this.#draw();
  }

  /** @param {string[][]} choices */
  #filters([pools, states, models]) {
    const menu = (name, label, values, text = (value) => value) =>
      ({ name, label, options: [["", "All"], ...values.map((value) => [value, text(value)])] });
    const filters = [
      { name: "name", label: "Name contains" },
      menu("pool", "Pool", pools),
      menu("state", "State", states, (state) => STATES[state]),
      menu("gpu", "GPU model", models),
    ];
    const changed = (wanted) => this.#choose({ ...wanted, page: "1" });
    return filterForm("Filter nodes", filters, this.wanted, { isLive: true, changed });
  }

  #choose(change) {
    Object.assign(this.wanted, change);
    history.replaceState(null, "", addressOf("/nodes", this.wanted, USUAL));
    this.#draw();
  }

  #draw() {
    const all = this.fleet.nodes.size;
    const found = sortRows(filterNodes(this.fleet.nodes.values(), this.wanted), COLUMNS, this.wanted.sort);
    const pages = Math.max(1, Math.ceil(found.length / ROWS));
    const at = Math.min(pages, Math.max(1, Math.floor(Number(this.wanted.page)) || 1));
    const rows = found.slice((at - 1) * ROWS, at * ROWS);
    this.frame.describe(summary(found, all));
    redraw(this.list, JSON.stringify([rows, at, pages, this.wanted.sort, all > 0]), () => {
      if (!rows.length) return all ? noMatch() : noNodes();
      const choose = (sort) => this.#choose({ sort, page: "1" });
      const shown = sortableTable("Nodes", COLUMNS, rows.map(row), this.wanted.sort, choose);
      return [
        el("section", { class: "card", "aria-label": "Nodes" }, shown),
        pageButtons("Pages of nodes", at, pages, (page) => this.#choose({ page: String(page) })),
      ];
    });
  }
}

function summary(found, all) {
  const total = found.reduce((sum, node) => sum + node.gpus, 0);
  const used = found.reduce((sum, node) => sum + node.held + node.inference, 0);
  const nodes = found.length === all ? plural(all, "node") : `${count(found.length)} of ${plural(all, "node")}`;
  return `${nodes}, ${count(used)} of ${gpus(total)} in use`;
}

function row(node) {
  const held = USED[node.state] ?? "training";
  const parts = [[held, node.held / node.gpus], ["inference", node.inference / node.gpus]];
  const label = `${node.held} of ${gpus(node.gpus)} in training, ${node.inference} in inference`;
  const use = bar(label, parts);
  use.title = label;
  return [
    el("a", { href: `#/nodes/${encodeURIComponent(node.name)}` }, node.name),
    badge(node.state, STATES[node.state]),
    el("a", { href: `#/pools/${encodeURIComponent(node.pool)}` }, node.pool),
    node.gpu,
    count(node.gpus),
    count(node.held + node.inference),
    use,
  ];
}

function noMatch() {
  const all = el("a", { href: "#/nodes", class: "button" }, "All nodes");
  return card("No nodes", empty("No matching nodes", "Change or clear the filters.", all));
}

function noNodes() {
  const todo = el("p", {}, "Add a node to a pool, or join a machine with ", el("code", {}, "ebbtide agent"), ":");
  return card("No nodes", empty("There are no nodes yet", todo, el("pre", {}, ADD)));
}
