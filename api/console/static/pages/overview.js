// Overview: both pools at a glance, what is lent, demand against capacity, who waits, and what just happened.

import { get } from "../api.js";
import { announce, problemNote, showProblem } from "../dialogs.js";
import { card, el, empty, figureOf, put, redraw, say } from "../dom.js";
import { FleetGrid } from "../fleet_grid.js";
import { count, gpus, percent, plural } from "../format.js";
import { lendingLevers, leverButton } from "../levers.js";
import { keepUp, onEvent } from "../live.js";
import { noLending, whoAmI } from "../who.js";
import { DemandChart, demandFigure } from "./overview_demand.js";
import { feed } from "./overview_feed.js";
import { queueTable, WaitingCard } from "./overview_queue.js";
import { nodeDialog } from "./node.js";

const NEWS = new Set(["NodeLent", "LoanActive", "NodeRecalled", "NodeReturned", "Breach"]);

const HOLDING = ["starting", "running", "resizing"];
const NO_LEADER = "No controller leads: what is asked for is accepted and waits.";

export const title = () => "Overview";

export async function show(root, { signal }) {
  const page = new Overview(root, signal);
  const keeping = keepUp(() => page.refresh(), { signal, failed: (error) => page.failed(error) });
  page.again = keeping;
  onEvent((event) => event && NEWS.has(event.code) && announce(event.code, event.message), signal);
}

class Overview {
  constructor(root, signal) {
    this.root = root;
    this.signal = signal;
    this.nodes = new Map();
    this.grids = new Map();
    this.charts = new Map();
    this.places = null;
    this.feed = feed(signal);
    this.waiting = new WaitingCard(signal);
  }

  async refresh() {
    const looking = get("/v1/overview", { query: { generation: this.known }, signal: this.signal });
    const [told, who] = await Promise.all([looking, whoAmI()]);
    this.hindered = noLending(who);
    this.known = told.generation;
    if (told.complete) this.nodes.clear();
    for (const node of told.nodes) this.nodes.set(node.name, node);
    for (const name of told.gone) this.nodes.delete(name);
    this.places ??= this.#frame();
    this.#draw(told);
    const charts = [...this.charts.values()].map((chart) => chart.refresh(told));
    await Promise.all([this.feed.refresh(told), ...charts]);
  }

  failed(error) {
    if (this.places) put(this.places.refused, error && problemNote(error));
    else showProblem(this.root, error);
  }

  #frame() {
    const names = ["levers", "refused", "leader", "figures", "pools", "charts", "queues"];
    const places = Object.fromEntries(names.map((name) => [name, el("div", { class: "stack" })]));
    places.levers.className = "row";
    places.summary = el("p", { class: "muted" });
    const title = el("div", { class: "grow" }, el("h1", {}, "Overview"), places.summary);
    put(
      this.root,
      el("div", { class: "head" }, title, places.levers),
      el("div", { class: "stack" }, places.refused, places.leader, places.figures, el("div", { class: "columns" },
        el("div", { class: "stack" }, places.pools, places.charts),
        el("div", { class: "stack" }, this.waiting.card, places.queues, card("What just happened", this.feed.place)))),
    );
    return places;
  }

  #draw(told) {
    const { places } = this;
    say(places.summary, sentence(told));
    redraw(places.leader, told.leader, () => (told.leader ? null : el("p", { class: "note warn" }, NO_LEADER)));
    this.#drawLevers(told);
    const figures = this.#figures(told);
    redraw(places.figures, figures.textContent, () => figures);
    this.#drawPools(told);
    this.waiting.update(told);
    redraw(places.queues, JSON.stringify(told.queues), () => queueTable(told));
  }

  #drawLevers(told) {
    const lentGpus = this.#lent().reduce((sum, node) => sum + node.gpus, 0);
    const state = JSON.stringify([told.switches, told.loans, lentGpus, this.hindered]);
    if (state === this.leverState) return; // a button that somebody is about to press stays where it is
    this.leverState = state;
    const levers = lendingLevers({ switches: told.switches, loans: told.loans, lentGpus, hindered: this.hindered });
    const options = { refused: this.places.refused, acted: () => this.again() };
    put(this.places.levers, levers.map((lever) => leverButton(lever, options)));
  }

  #lent() {
    return [...this.nodes.values()].filter((node) => node.state === "lent" || node.state === "recalled");
  }

  #figures(told) {
    const lent = this.#lent();
    const nodes = [...this.nodes.values()];
    const held = nodes.reduce((sum, node) => sum + node.held, 0);
    const training = told.pools.filter((pool) => pool.kind === "training");
    const own = training.reduce((sum, pool) => sum + pool.capacity_gpus, 0);
    const lentGpus = lent.reduce((sum, node) => sum + node.gpus, 0);
    const recalled = told.loans.recalled || 0;
    const waiting = told.queues.reduce((sum, queue) => sum + queue.waiting_jobs, 0);
    const needed = told.queues.reduce((sum, queue) => sum + queue.waiting_gpus, 0);
    const used = `${percent(held / (own + lentGpus || 1))} in use${lentGpus ? `, ${gpus(lentGpus)} of them lent` : ""}`;
    const onLoan = `${gpus(lentGpus)}${recalled ? `, ${plural(recalled, "node")} called home` : ""}`;
    const holding = HOLDING.reduce((sum, state) => sum + (told.jobs[state] || 0), 0);
    const running = `${plural(holding, "job")} on GPUs`;
    const asked = waiting ? `at least ${gpus(needed)} asked for; ${running}` : running;
    const inference = told.pools.filter((pool) => pool.kind === "inference").slice(0, 2);
    return el("dl", { class: "figures" }, [
      figureOf("training", "GPUs in training", count(held), `of ${count(own + lentGpus)}`, used),
      ...inference.map((pool) => demandFigure(pool, this.#lentOf(pool), told.pools.length > 2)),
      figureOf("lent", "Lent to training", count(lent.length), lent.length === 1 ? "node" : "nodes", onLoan),
      figureOf("queued", "Waiting jobs", count(waiting), "", asked),
    ]);
  }

  /** GPUs of a pool that training has: {lent, recalled}, those that are on their way home apart. */
  #lentOf(pool) {
    const found = { lent: 0, recalled: 0 };
    for (const node of this.#lent()) if (node.pool === pool.name) found[node.state] += node.gpus;
    return found;
  }

  #drawPools(told) {
    if (!told.pools.length) {
      put(this.places.pools, card("Pools", noPools()));
      return;
    }
    const names = told.pools.map((pool) => `${pool.name} ${pool.nodes > 0}`).join("\n");
    if (names !== this.poolNames) this.#newPools(told, names);
    for (const pool of told.pools) {
      const grid = this.grids.get(pool.name);
      const mine = (told.complete ? [...this.nodes.values()] : told.nodes).filter((node) => node.pool === pool.name);
      const gone = [...grid.nodes.keys()].filter((name) => this.nodes.get(name)?.pool !== pool.name);
      grid.update(mine, gone);
      const up = pool.capacity_gpus < pool.gpus ? `, ${gpus(pool.capacity_gpus)} up` : "";
      say(grid.size, `${plural(pool.nodes, "node")}, ${gpus(pool.gpus)}${up}`);
    }
  }

  #newPools(told, names) {
    this.poolNames = names;
    this.grids = new Map(told.pools.map((pool) => [pool.name, new FleetGrid(pool.name, nodeDialog)]));
    const nodesOf = (pool) => [...this.nodes.values()].filter((node) => node.pool === pool);
    for (const [name, grid] of this.grids) grid.update(nodesOf(name), []);
    const ordered = [...told.pools].sort((a, b) => (a.kind < b.kind) - (a.kind > b.kind));
    put(this.places.pools, ordered.map((pool) => this.#poolCard(pool)));
    const inference = ordered.filter((pool) => pool.kind === "inference");
    this.charts = new Map(inference.map((pool) => [pool.name, new DemandChart(pool.name, this.signal)]));
    put(this.places.charts, [...this.charts.values()].map((chart) => chart.place));
  }

  #poolCard(pool) {
    const grid = this.grids.get(pool.name);
    grid.size = el("span", { class: "small muted" });
    const kind = pool.name === pool.kind ? "" : ` (${pool.kind})`;
    const none = el("pre", {}, `ebbtide nodes add NAME --pool ${pool.name} --gpu a100-80g --gpus 8`);
    return card([`Pool ${pool.name}${kind}`, grid.size], pool.nodes ? grid.parts : empty("No nodes yet", none));
  }
}

function sentence(told) {
  const { switches } = told;
  if (switches.loans_recalled) return "Every loan is recalled; nothing is lent until lending is resumed.";
  if (switches.lending_paused) return "Lending is paused; what is lent stays lent.";
  const live = Object.values(told.loans).reduce((sum, each) => sum + each, 0);
  return live ? `The tide is in: ${plural(live, "inference node")} on loan to training.` : "Nothing is lent now.";
}

function noPools() {
  const commands = [
    "ebbtide pools create training --kind training",
    "ebbtide nodes add t0 --pool training --gpu a100-80g --gpus 8",
  ];
  const todo = "Make one for training and one for inference, then register nodes:";
  return empty("There are no pools yet", todo, el("pre", {}, commands.join("\n")));
}
