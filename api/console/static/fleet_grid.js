// Grid of a pool's nodes: tiles with their GPUs for few nodes, cells for many. Redraws changed nodes only.

import { el, put, say } from "./dom.js";
import { count, gpus } from "./format.js";

export const STATES = {
  training: "training",
  inference: "inference",
  idle: "idle",
  offered: "offered",
  lent: "lent",
  recalled: "recalled",
  cordoned: "cordoned",
  down: "down",
};
const MEANING = {
  offered: "offered to training; inference is draining",
  lent: "lent to training",
  recalled: "recalled; training is draining",
};
const TILES_MAX = 36;
const CELL_PX = [[120, 26], [320, 20], [700, 15], [Infinity, 13]];
const HOW = "Hover over a node or use the arrow keys. Press Enter to show its jobs.";
const byName = new Intl.Collator("en", { numeric: true });

/** The grid of one pool. Calls `pick(name)` for a selected node. */
export class FleetGrid {
  constructor(pool, pick) {
    this.nodes = new Map();
    this.cells = new Map();
    this.list = el("ul", { class: "nodes", role: "listbox", "aria-label": `Nodes of pool ${pool}` });
    this.caption = el("p", { class: "small muted" });
    this.legend = el("ul", { class: "legend", "aria-label": `Nodes of pool ${pool} by state` });
    this.list.addEventListener("keydown", (event) => this.#move(event, pick));
    this.list.addEventListener("click", (event) => pickIn(event, pick));
    this.list.addEventListener("mouseover", (event) => this.#describe(event));
    this.list.addEventListener("focusin", (event) => this.#describe(event));
    this.parts = [this.legend, this.list, this.caption];
  }

  /** Applies changed nodes and removes deleted nodes. */
  update(changed, gone) {
    const isNew = changed.some((node) => !this.nodes.has(node.name)) || gone.some((name) => this.nodes.has(name));
    for (const node of changed) this.nodes.set(node.name, node);
    for (const name of gone) this.nodes.delete(name);
    if (isNew) this.#layOut();
    else for (const node of changed) this.#dress(this.cells.get(node.name), node);
    if (isNew || changed.length) this.#count();
  }

  #layOut() {
    const names = [...this.nodes.keys()].sort(byName.compare);
    this.hasTiles = names.length <= TILES_MAX;
    this.list.classList.toggle("tiles", this.hasTiles);
    this.list.style.setProperty("--cell", `${CELL_PX.find(([most]) => names.length <= most)[1]}px`);
    const cell = (name) => el("li", { role: "option", tabindex: "-1", data: { name } });
    this.cells = new Map(names.map((name) => [name, this.#dress(cell(name), this.nodes.get(name))]));
    put(this.list, [...this.cells.values()]);
    this.list.firstChild?.setAttribute("tabindex", "0");
    say(this.caption, this.hasTiles ? "" : HOW);
  }

  #dress(cell, node) {
    cell.dataset.state = node.state;
    cell.className = this.hasTiles ? "tile" : "cell";
    cell.setAttribute("aria-label", sentence(node));
    cell.style.setProperty("--fill", `${Math.round((100 * Math.max(node.held, node.inference)) / node.gpus)}%`);
    if (this.hasTiles) {
      const word = el("span", { class: "word" }, STATES[node.state]);
      put(cell, el("strong", { title: node.name }, node.name), " ", word, el("span", { class: "pips" }, pips(node)));
    }
    return cell;
  }

  #count() {
    const found = {};
    for (const node of this.nodes.values()) found[node.state] = (found[node.state] || 0) + 1;
    const swatch = (state) => el("span", { class: "swatch", data: { state } });
    const entry = (state) => el("li", {}, swatch(state), STATES[state], el("b", {}, count(found[state])));
    put(this.legend, Object.keys(STATES).filter((state) => found[state]).map(entry));
  }

  #describe(event) {
    const node = this.nodes.get(event.target.closest("li")?.dataset.name);
    if (node && !this.hasTiles) say(this.caption, sentence(node));
  }

  #move(event, pick) {
    const at = event.target.closest("li");
    if (!at) return;
    if (event.key === "Enter" || event.key === " ") pickIn(event, pick);
    const columns = getComputedStyle(this.list).gridTemplateColumns.split(" ").length;
    const ends = { Home: -Infinity, End: Infinity };
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, ...ends };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const all = [...this.list.children];
    const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(at) + steps[event.key]))];
    at.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }
}

function pickIn(event, pick) {
  const name = event.target.closest("li")?.dataset.name;
  if (!name) return;
  event.preventDefault();
  pick(name);
}

function sentence(node) {
  const used = node.held ? `, ${node.held} of ${gpus(node.gpus)} in training` : "";
  const served = node.inference ? `, ${node.inference} of ${gpus(node.gpus)} in inference` : "";
  const size = used || served ? "" : `, ${gpus(node.gpus)}`;
  return `${node.name} ${MEANING[node.state] || STATES[node.state]}${used}${served}${size}`;
}

function pips(node) {
  const training = ["lent", "recalled"].includes(node.state) ? node.state : "training";
  const kinds = [...Array(node.held).fill(training), ...Array(node.inference).fill("inference")];
  const pip = (state) => el("span", { class: "pip", data: { state } });
  return Array.from({ length: node.gpus }, (_, at) => pip(kinds[at] || "idle"));
}
