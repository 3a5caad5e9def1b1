// Overview page: pools, loans, demand and capacity, pending jobs, queues and recent events.

import { get } from "../api.js";
import { announce, problemNote, showProblem } from "../dialogs.js";
import { parseTime } from "../capacity_data.js";
import { CapacityTimeline } from "../capacity_timeline.js";
import { card, el, empty, figureOf, put, redraw, say } from "../dom.js";
import { FleetGrid } from "../fleet_grid.js";
import { count, gpus, percent, plural } from "../format.js";
import { PastFleet } from "../history_scrubber.js";
import { lendingActions, actionButton } from "../actions.js";
import { keepUp, onEvent } from "../live.js";
import { noLending, whoAmI } from "../permissions.js";
import { ProblemStrip } from "../problem_strip.js";
import { demandFigure } from "./overview_demand.js";
import { feed } from "./overview_feed.js";
import { queueTable, WaitingCard } from "./overview_queue.js";
import { nodeDialog } from "./node.js";

const NEWS = new Set(["NodeLent", "LoanActive", "NodeRecalled", "NodeReturned", "Breach"]);

const HOLDING = ["starting", "running", "resizing"];

export const title = () => "Overview";

export async function show(root, { query, signal }) {
  const page = new Overview(root, query, signal);
  const keeping = keepUp(() => page.refresh(), { signal, failed: (error) => page.failed(error) });
  page.again = keeping;
  onEvent((event) => event && NEWS.has(event.code) && announce(event.code, event.message), signal);
}

class Overview {
  again = async () => {}; // set once the page refreshes itself

  constructor(root, query, signal) {
    this.root = root;
    this.query = query;
    this.signal = signal;
    this.nodes = new Map();
    this.grids = new Map();
    this.timeline = new CapacityTimeline({ signal, query, shown: (atS) => this.#showTime(atS) });
    this.past = new PastFleet({ signal, leave: () => this.timeline.pick(null) });
    this.places = null;
    this.feed = feed(signal);
    this.waiting = new WaitingCard(signal);
    this.problems = new ProblemStrip(signal);
  }

  async refresh() {
    const looking = get("/v1/overview", { query: { generation: this.known }, signal: this.signal });
    const [overview, who] = await Promise.all([looking, whoAmI()]);
    this.disabledReason = noLending(who);
    this.known = overview.generation;
    if (overview.complete) this.nodes.clear();
    for (const node of overview.nodes) this.nodes.set(node.name, node);
    for (const name of overview.gone) this.nodes.delete(name);
    this.places ??= this.#frame();
    this.#draw(overview);
    this.timeline.place.hidden = !overview.pools.length;
    const atS = parseTime(this.query?.get("at"), overview.now_s);
    this.query = null; // the address names a time when the page opens
    if (atS !== null) this.timeline.cover(atS, overview.now_s);
    const charts = overview.pools.length ? this.timeline.refresh(overview.now_s) : null;
    await Promise.all([this.feed.refresh(overview), charts]);
    if (atS !== null) this.timeline.pick(atS);
  }

  failed(error) {
    if (this.places) put(this.places.refused, error && problemNote(error));
    else showProblem(this.root, error);
  }

  #frame() {
    const names = ["actions", "refused", "figures", "pools", "queues"];
    const places = Object.fromEntries(names.map((name) => [name, el("div", { class: "stack" })]));
    places.actions.className = "row";
    places.summary = el("p", { class: "muted" });
    places.live = el("div", { class: "stack" }, places.figures, el("div", { class: "columns" },
      el("div", { class: "stack" }, places.pools),
      el("div", { class: "stack" }, this.waiting.card, places.queues, card("Recent events", this.feed.place))));
    const title = el("div", { class: "grow" }, el("h1", {}, "Overview"), places.summary);
    put(
      this.root,
      el("div", { class: "head" }, title, places.actions),
      el("div", { class: "stack" }, places.refused, this.problems.place, this.timeline.place, this.past.place,
        places.live),
    );
    return places;
  }

  /** Shows the fleet at a past time instead of the present; null is the present. */
  #showTime(atS) {
    this.past.show(atS);
    this.places.live.hidden = atS !== null;
  }

  #draw(overview) {
    const { places } = this;
    say(places.summary, sentence(overview));
    this.#drawLevers(overview);
    const figures = this.#figures(overview);
    redraw(places.figures, figures.textContent, () => figures);
    this.#drawPools(overview);
    this.waiting.update(overview);
    redraw(places.queues, JSON.stringify(overview.queues), () => queueTable(overview));
  }

  #drawLevers(overview) {
    const lentGpus = this.#lent().reduce((sum, node) => sum + node.lent, 0);
    const state = JSON.stringify([overview.switches, overview.loans, lentGpus, this.disabledReason]);
    if (state === this.actionState) return; // keep buttons in place while the user is about to press one
    this.actionState = state;
    const { switches, loans } = overview;
    const actions = lendingActions({ switches, loans, lentGpus, disabledReason: this.disabledReason });
    const options = { refused: this.places.refused, acted: () => this.again() };
    put(this.places.actions, actions.map((action) => actionButton(action, options)));
  }

  #lent() {
    return [...this.nodes.values()].filter((node) => node.state === "lent" || node.state === "recalled");
  }

  #figures(overview) {
    const lent = this.#lent();
    const nodes = [...this.nodes.values()];
    const held = nodes.reduce((sum, node) => sum + node.held, 0);
    const training = overview.pools.filter((pool) => pool.kind === "training");
    const own = training.reduce((sum, pool) => sum + pool.capacity_gpus, 0);
    const lentGpus = lent.reduce((sum, node) => sum + node.lent, 0);
    const recalled = overview.loans.recalled || 0;
    const waiting = overview.queues.reduce((sum, queue) => sum + queue.waiting_jobs, 0);
    const needed = overview.queues.reduce((sum, queue) => sum + queue.waiting_gpus, 0);
    const used = `${percent(held / (own + lentGpus || 1))} in use${lentGpus ? `, ${gpus(lentGpus)} of them lent` : ""}`;
    const onLoan = `${gpus(lentGpus)}${recalled ? `, ${plural(recalled, "node")} recalled` : ""}`;
    const holding = HOLDING.reduce((sum, state) => sum + (overview.jobs[state] || 0), 0);
    const running = `${plural(holding, "job")} on GPUs`;
    const pendingNote = waiting ? `at least ${gpus(needed)} requested; ${running}` : running;
    const inference = overview.pools.filter((pool) => pool.kind === "inference").slice(0, 2);
    return el("dl", { class: "figures" }, [
      figureOf("training", "GPUs in training", count(held), `of ${count(own + lentGpus)}`, used),
      ...inference.map((pool) => demandFigure(pool, this.#lentOf(pool), overview.pools.length > 2)),
      figureOf("lent", "Lent to training", count(lent.length), lent.length === 1 ? "node" : "nodes", onLoan),
      figureOf("queued", "Pending jobs", count(waiting), "", pendingNote),
    ]);
  }

  /** Returns the GPUs of a pool that training uses: {lent, recalled}. */
  #lentOf(pool) {
    const found = { lent: 0, recalled: 0 };
    for (const node of this.#lent()) if (node.pool === pool.name) found[node.state] += node.lent;
    return found;
  }

  #drawPools(overview) {
    if (!overview.pools.length) {
      put(this.places.pools, card("Pools", noPools()));
      return;
    }
    const names = overview.pools.map((pool) => `${pool.name} ${pool.nodes > 0}`).join("\n");
    if (names !== this.poolNames) this.#newPools(overview, names);
    for (const pool of overview.pools) {
      const grid = this.grids.get(pool.name);
      const changed = overview.complete ? [...this.nodes.values()] : overview.nodes;
      const mine = changed.filter((node) => node.pool === pool.name);
      const gone = [...grid.nodes.keys()].filter((name) => this.nodes.get(name)?.pool !== pool.name);
      grid.update(mine, gone);
      const up = pool.capacity_gpus < pool.gpus ? `, ${gpus(pool.capacity_gpus)} up` : "";
      say(grid.size, `${plural(pool.nodes, "node")}, ${gpus(pool.gpus)}${up}`);
    }
  }

  #newPools(overview, names) {
    this.poolNames = names;
    this.grids = new Map(overview.pools.map((pool) => [pool.name, new FleetGrid(pool.name, nodeDialog)]));
    const nodesOf = (pool) => [...this.nodes.values()].filter((node) => node.pool === pool);
    for (const [name, grid] of this.grids) grid.update(nodesOf(name), []);
    const ordered = [...overview.pools].sort((a, b) => b.kind.localeCompare(a.kind));
    put(this.places.pools, ordered.map((pool) => this.#poolCard(pool)));
  }

  #poolCard(pool) {
    const grid = this.grids.get(pool.name);
    grid.size = el("span", { class: "small muted" });
    const kind = pool.name === pool.kind ? "" : ` (${pool.kind})`;
    const none = el("pre", {}, `ebbtide nodes add NAME --pool ${pool.name} --gpu a100-80g --gpus 8`);
    return card([`Pool ${pool.name}${kind}`, grid.size], pool.nodes ? grid.parts : empty("No nodes yet", none));
  }
}

function sentence(overview) {
  const { switches } = overview;
  if (switches.loans_recalled) return "All loans are recalled. No node is lent until lending is resumed.";
  if (switches.lending_paused) return "Lending is paused. Current loans continue.";
  const live = Object.values(overview.loans).reduce((sum, each) => sum + each, 0);
  return live ? `${plural(live, "inference node")} lent to training.` : "No node is lent now.";
}

function noPools() {
  const commands = [
    "ebbtide pools create training --kind training",
    "ebbtide nodes add t0 --pool training --gpu a100-80g --gpus 8",
  ];
  const todo = "Create a training pool and an inference pool, then add nodes:";
  return empty("There are no pools yet", todo, el("pre", {}, commands.join("\n")));
}
