// Overview: both pools at a glance, what is lent, demand against capacity, who waits, and what just happened.

import { get } from "../api.js";
import { announce, problemNote, showProblem } from "../dialogs.js";
import { card, el, empty, put, redraw, say } from "../dom.js";
import { FleetGrid } from "../fleet_grid.js";
import { count, duration, figure, gpus, percent, plural } from "../format.js";
import { lendingLevers, leverButton } from "../levers.js";
import { keepUp, onEvent } from "../live.js";
import { DemandChart } from "./overview_demand.js";
import { feed, queueTable, waitingTable } from "./overview_queue.js";
import { nodeDialog } from "./node.js";

const NEWS = { NodeLent: 1, LoanActive: 1, NodeRecalled: 1, NodeReturned: 1, Breach: 1 };

export const title = () => "Overview";

export async function show(root, { signal }) {
  const page = new Overview(root, signal);
  const keeping = keepUp(() => page.refresh(), { signal, failed: (error) => page.failed(error) });
  page.again = keeping;
  onEvent((event) => event && event.code in NEWS && announce(event.message), signal);
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
  }

  async refresh() {
    const told = await get("/v1/overview", { query: { generation: this.known }, signal: this.signal });
    this.known = told.generation;
    if (told.complete) this.nodes.clear();
    for (const node of told.nodes) this.nodes.set(node.name, node);
    for (const name of told.gone) this.nodes.delete(name);
    this.places ??= this.#frame();
    this.#draw(told);
    await Promise.all([this.feed.refresh(told), ...[...this.charts.values()].map((chart) => chart.refresh(told))]);
  }

  failed(error) {
    if (this.places) put(this.places.refused, error && problemNote(error));
    else showProblem(this.root, error);
  }

  #frame() {
    const names = ["summary", "levers", "refused", "leader", "figures", "pools", "charts", "queues", "waiting"];
    const places = Object.fromEntries(names.map((name) => [name, el("div", { class: name === "figures" ? null : "stack" })]));
    places.levers.className = "row";
    places.summary = el("p", { class: "muted" });
    put(
      this.root,
      el("div", { class: "head" }, el("div", { class: "grow" }, el("h1", {}, "Overview"), places.summary), places.levers),
      el("div", { class: "stack" }, places.refused, places.leader, places.figures, el("div", { class: "columns" },
        el("div", { class: "stack" }, places.pools, places.charts),
        el("div", { class: "stack" }, places.queues, card("What just happened", this.feed.place)))),
    );
    return places;
  }

  #draw(told) {
    const { places } = this;
    say(places.summary, sentence(told));
    redraw(places.leader, told.leader, () => told.leader ? null : el("p", { class: "note warn" }, "No controller leads: what is asked for is accepted and waits."));
    this.#drawLevers(told);
    const figures = this.#figures(told);
    redraw(places.figures, figures.textContent, () => figures);
    this.#drawPools(told);
    const queues = [JSON.stringify([told.queues, told.waiting, told.jobs]), Math.floor(told.now_s / 10)].join();
    redraw(places.queues, queues, () => [card(["Waiting", el("a", { href: "#/jobs?state=live", class: "small" }, "All jobs")], waitingTable(told)), queueTable(told)]);
  }

  #drawLevers(told) {
    const lentGpus = this.#lent().reduce((sum, node) => sum + node.gpus, 0);
    const state = JSON.stringify([told.switches, told.loans, lentGpus]);
    if (state === this.leverState) return; // a button that somebody is about to press stays where it is
    this.leverState = state;
    const levers = lendingLevers({ switches: told.switches, loans: told.loans, lentGpus });
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
    const own = told.pools.filter((pool) => pool.kind === "training").reduce((sum, pool) => sum + pool.capacity_gpus, 0);
    const lentGpus = lent.reduce((sum, node) => sum + node.gpus, 0);
    const recalled = told.loans.recalled || 0;
    const waiting = told.queues.reduce((sum, queue) => sum + queue.waiting_jobs, 0);
    const needed = told.queues.reduce((sum, queue) => sum + queue.waiting_gpus, 0);
    return el("dl", { class: "figures" }, [
      figureOf("training", "GPUs in training", count(held), `of ${count(own + lentGpus)}`, percent(held / (own + lentGpus || 1)) + " in use"),
      ...demandFigure(told.pools),
      figureOf("lent", "Lent to training", count(lent.length), plural(lent.length, "node").split(" ")[1], `${gpus(lentGpus)}${recalled ? `, ${recalled} being recalled` : ""}`),
      figureOf("queued", "Waiting jobs", count(waiting), "", waiting ? `at least ${gpus(needed)} asked for` : `${plural(told.jobs.running || 0, "job")} running`),
    ]);
  }

  #drawPools(told) {
    if (!told.pools.length) {
      put(this.places.pools, card("Pools", noPools()));
      return;
    }
    const names = told.pools.map((pool) => pool.name).join("\n");
    if (names !== this.poolNames) this.#newPools(told, names);
    for (const pool of told.pools) {
      const grid = this.grids.get(pool.name);
      const mine = (told.complete ? [...this.nodes.values()] : told.nodes).filter((node) => node.pool === pool.name);
      const gone = told.complete ? [...grid.nodes.keys()].filter((name) => !this.nodes.has(name)) : told.gone;
      grid.update(mine, gone);
      say(grid.size, `${plural(pool.nodes, "node")}, ${gpus(pool.gpus)}${pool.capacity_gpus < pool.gpus ? `, ${gpus(pool.capacity_gpus)} up` : ""}`);
    }
  }

  #newPools(told, names) {
    this.poolNames = names;
    this.grids = new Map(told.pools.map((pool) => [pool.name, new FleetGrid(pool.name, nodeDialog)]));
    for (const [name, grid] of this.grids) grid.update([...this.nodes.values()].filter((node) => node.pool === name), []);
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
    return card([`Pool ${pool.name}${kind}`, grid.size], pool.nodes ? grid.parts : empty("No nodes yet", "Register them with: ebbtide node add"));
  }
}

function sentence(told) {
  const { switches } = told;
  if (switches.loans_recalled) return "Every loan is recalled; nothing is lent until lending is resumed.";
  if (switches.lending_paused) return "Lending is paused; what is lent stays lent.";
  const live = Object.values(told.loans).reduce((sum, each) => sum + each, 0);
  return live ? `The tide is in: ${plural(live, "inference node")} on loan to training.` : "Nothing is lent now.";
}

function figureOf(state, name, value, unit, below) {
  return el("div", { class: "figure", data: { state } }, el("dt", {}, name), el("dd", {}, value, unit && el("small", {}, unit)), el("dd", { class: "muted" }, below));
}

function demandFigure(pools) {
  return pools.filter((pool) => pool.kind === "inference").slice(0, 2).map((pool) => {
    const { demand, forecast } = pool;
    const level = forecast ? Math.max(0, forecast.quantiles.findIndex((each) => each >= pool.quantile)) : 0;
    const below = forecast
      ? `at most ${figure(forecast.gpus[level])} within ${duration(forecast.horizon_s)} (${percent(forecast.quantiles[level])} sure)`
      : "no forecast yet";
    const name = pools.length > 2 ? `Demand of ${pool.name}` : "Inference demand";
    return figureOf("inference", name, demand ? figure(demand.gpus) : "–", `of ${gpus(pool.capacity_gpus)}`, demand ? below : "nothing told yet");
  });
}

function noPools() {
  return empty("There are no pools yet", "Make one for training and one for inference, then register nodes:", el("pre", {}, "ebbtide pool create training --kind training\nebbtide node add t0 --pool training --gpu a100-80g --gpus 8"));
}
