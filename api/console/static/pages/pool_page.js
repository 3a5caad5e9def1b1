// Pool page: why a pool lends or does not, its policy, promise and way back, demand, proposals and recalls.

import { get } from "../api.js";
import { CapacityTimeline } from "../capacity_timeline.js";
import { ChartCards } from "../chart_cards.js";
import { el, figureOf, put } from "../dom.js";
import { count, duration, figure, gpus, percent, plural } from "../format.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { lacksRole, whoAmI } from "../permissions.js";
import { poolActions } from "../pool_actions.js";
import { safetyCharts } from "../safety_charts.js";
import * as parts from "./pool_parts.js";
import { servedModels } from "./served_models.js";

const LOANS = 200;
const RECALLS = 20;
const LIVE = "proposed,offered,active,recalled";

export const title = (name) => `Pool ${name}`;

export async function show(root, { params, signal }) {
  const page = new PoolPage(root, params[0], signal);
  const wants = (event) => /^(Pool|Node|Loan|Demand|Shadow|Recall|Replicas|Lending)/.test(event.code);
  page.again = keepUp(() => page.refresh(), { signal, wants, failed: page.frame.failed });
}

class PoolPage {
  again = async () => {}; // set once the page refreshes itself

  constructor(root, name, signal) {
    this.name = name;
    this.signal = signal;
    this.frame = new PageFrame(root, `Pool ${name}`, { back: { href: "#/pools", name: "Pools" } });
    this.figures = el("div");
    this.timeline = null;
    this.month = new ChartCards(signal);
  }

  async refresh() {
    const read = (path, query = {}) => get(path, { query, signal: this.signal });
    const path = `/v1/pools/${encodeURIComponent(this.name)}`;
    const [pool, overview, who] = await Promise.all([
      read(path),
      read("/v1/overview", { generation: this.generation }),
      whoAmI(),
    ]);
    this.generation = overview.generation;
    this.who = who;
    this.frame.offer(poolActions(pool, lacksRole(who, "admin")), () => this.again());
    this.timeline ??= new CapacityTimeline({ signal: this.signal, pool: pool.name });
    if (pool.kind !== "inference") {
      this.#drawTraining(pool);
      await this.timeline.refresh(overview.now_s);
      return;
    }
    const [explanation, report, recalls, loans] = await Promise.all([
      read(`${path}/explanation`),
      read(`${path}/safety-report`),
      read("/v1/recalls", { pool: this.name, limit: RECALLS }),
      read("/v1/loans", { pool: this.name, state: LIVE, limit: LOANS }),
    ]);
    await this.#draw(pool, { overview, explanation, report, recalls: recalls.items, loans: loans.items });
  }

  #drawTraining(pool) {
    this.frame.describe(`training pool, ${plural(pool.nodes, "node")}`);
    const facts = this.frame.section("Size", pool, () => parts.sizeFacts(pool));
    this.frame.fill(() => [this.timeline.place, facts]);
  }

  async #draw(pool, { overview, explanation, report, recalls, loans }) {
    const { frame } = this;
    const summary = overview.pools.find((each) => each.name === pool.name);
    const proposed = loans.filter((loan) => loan.state === "proposed");
    frame.describe(`inference pool, ${plural(pool.nodes, "node")}, ${gpus(pool.gpus)}`);
    const figures = poolFigures(pool, explanation, summary.shortages);
    if (figures.textContent !== this.figures.textContent) put(this.figures, figures);
    const disabledReason = lacksRole(this.who, "admin");
    const veto = { vetoS: pool.lending.veto_s, disabledReason, refused: frame.refused, acted: () => this.again() };
    const cards = {
      why: frame.section("Why it lends no more", explanation, () => parts.explanationParts(explanation)),
      proposals: frame.section("Proposed loans", [proposed, disabledReason], () => parts.proposals(proposed, veto)),
      shadow: frame.section("Shadow mode", pool.shadow, () => pool.shadow && parts.shadowFacts(pool.shadow)),
      promise: frame.section("Promise", [summary.shortages, report], () => parts.promise(summary.shortages, report)),
      wayBack: frame.section("Way back", [pool.way_back, pool.lending], () => parts.wayBackFacts(pool)),
      policy: frame.section("Lending policy", pool.lending, () => parts.policyFacts(pool.lending)),
      calendar: frame.section("Calendar", pool.lending, () => parts.calendar(pool.lending)),
      source: frame.section("Demand source", [pool.demand_source, pool.demand], () => parts.sourceFacts(pool)),
      serving: frame.section("Served models", pool.serving, () => servedModels(pool.serving)),
      recalls: frame.section("Recalls", recalls, () => parts.recallTable(recalls)),
      size: frame.section("Size", pool, () => parts.sizeFacts(pool)),
    };
    this.month.update(safetyCharts(report));
    frame.fill(() => [this.figures, el("div", { class: "columns" },
      el("div", { class: "stack" }, cards.proposals, cards.why, this.timeline.place, cards.serving, this.month.place,
        cards.recalls),
      el("div", { class: "stack" }, cards.shadow, cards.promise, cards.wayBack, cards.policy, cards.calendar,
        cards.source, cards.size))]);
    await this.timeline.refresh(overview.now_s);
  }
}

function poolFigures(pool, explanation, shortages) {
  const { demand } = pool;
  const needed = `${figure(explanation.needed_gpus)} needed at quantile ${explanation.quantile}`;
  const short = shortages.intervals ? shortages.short_intervals / shortages.intervals : null;
  const promised = shortages.target === null ? "no target" : `target ${percent(shortages.target)}`;
  const capacity = `of ${gpus(pool.capacity_gpus)}`;
  const wayBack = duration(pool.way_back.horizon_s);
  return el("dl", { class: "figures" }, [
    figureOf("inference", "Inference demand", demand ? figure(demand.gpus) : "–", capacity, needed),
    figureOf("lent", "Lent nodes", count(pool.lent_nodes), `of ${count(pool.nodes)}`,
      `${gpus(pool.lent_gpus)}; ${plural(explanation.lendable_nodes, "loan")} possible now`),
    figureOf("recalled", "Short by lending", percent(short), promised, "of the time in the last four weeks"),
    figureOf("idle", "Way back", wayBack, "", "from recall until inference serves again"),
  ]);
}
