// Loans page: a timeline with one lane per lent node and one span per loan, from the offer to the return.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, card, el, empty, put, table } from "../dom.js";
import { duration, plural, time, timeToMinute } from "../format.js";
import { lendingActions, actionButton } from "../actions.js";
import { keepUp } from "../live.js";
import { loanGpus } from "../loan_gpus.js";
import { due, when } from "../times.js";
import { noLending, whoAmI } from "../permissions.js";

const LANES_MAX = 120;
const ROWS_MAX = 60;
const LOANS_AT_ONCE = 500;
const LIVE_MAX = 1000;
/** @type {[string, number][]} */
const SPANS = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["7 d", 604800]];
const USUAL_SPAN_S = 86400;
const KINDS = [["offered", "offered"], ["active", "lent"], ["recalled", "recalled"], ["lost", "node lost"]];
const byName = new Intl.Collator("en", { numeric: true });

export const title = () => "Loans";

export async function show(root, { query, signal }) {
  const page = new LoansPage(root, Number(query.get("last")) || 0, signal);
  const wants = (event) => /^(Node|Loan|Lending)/.test(event.code);
  page.again = keepUp(() => page.refresh(), { signal, wants, failed: (error) => page.failed(error) });
}

class LoansPage {
  again = async () => {}; // set once the page refreshes itself
  older = [];
  next = undefined;
  loans = null;

  /** `spanS`: length of the timeline in seconds; 0 fits it to the loans, up to USUAL_SPAN_S. */
  constructor(root, spanS, signal) {
    this.spanS = spanS;
    this.signal = signal;
    this.places = { actions: el("div", { class: "row" }), body: el("div", { class: "stack" }), refused: el("div") };
    this.span = el("select", { id: "span", on: { change: (event) => this.#choose(Number(event.target.value)) } });
    const choice = el("label", { class: "row small" }, "Last", this.span);
    put(
      root,
      el("div", { class: "head" }, el("h1", { class: "grow" }, "Loans"), choice, this.places.actions),
      el("div", { class: "stack" }, this.places.refused, this.places.body),
    );
  }

  async refresh() {
    const { signal } = this;
    const [newest, live, fleet, who] = await Promise.all([
      get("/v1/loans", { query: { limit: LOANS_AT_ONCE }, signal }),
      get("/v1/loans", { query: { state: "live", limit: LIVE_MAX }, signal }),
      get("/v1/overview", { query: { generation: this.generation }, signal }),
      whoAmI(),
    ]);
    this.generation = fleet.generation;
    this.next = this.next === undefined ? newest.next : this.next;
    this.newest = newest.items;
    this.live = live.items;
    this.nowS = fleet.now_s;
    this.#draw();
    this.#drawLevers(fleet, noLending(who));
  }

  failed(error) {
    put(this.places.refused, error && problemNote(error));
  }

  async loadOlder() {
    try {
      const page = await get("/v1/loans", { query: { limit: LOANS_AT_ONCE, cursor: this.next }, signal: this.signal });
      this.older.push(...page.items.filter((loan) => !loan.is_live));
      this.next = page.next;
      this.#draw();
    } catch (error) {
      this.failed(error);
    }
  }

  #choose(spanS) {
    this.spanS = spanS;
    history.replaceState(null, "", `#/loans?last=${spanS}`);
    if (this.loans) this.#draw();
  }

  #draw() {
    this.loans = [...new Map([...this.older, ...this.newest, ...this.live].map((loan) => [loan.id, loan])).values()];
    this.loans.sort((a, b) => b.offered_at_s - a.offered_at_s);
    const spanS = this.spanS || usualSpan(this.loans, this.nowS);
    const options = SPANS.map(([name, value]) => el("option", { value, selected: value === spanS }, name));
    if (Number(this.span.value) !== spanS || !this.span.options.length) put(this.span, options);
    put(this.places.body, contents(this.loans, this.nowS, spanS), this.#hidden());
  }

  /** Notes that older loans are not shown, with a button that loads them. */
  #hidden() {
    if (!this.next) return null;
    const oldest = Math.min(...[...this.older, ...this.newest].map((loan) => loan.offered_at_s));
    const read = plural(this.loans.length, "loan");
    const description = el("span", {}, `${read} loaded. Ended loans offered before `, when(oldest), " are not shown.");
    const more = el("button", { type: "button", on: { click: () => this.loadOlder() } }, `Load ${LOANS_AT_ONCE} more`);
    return el("div", { class: "note row spread" }, description, more);
  }

  #drawLevers(fleet, disabledReason) {
    const lent = this.live.filter((loan) => !["proposed", "offered"].includes(loan.state));
    const lentGpus = lent.reduce((sum, loan) => sum + loan.gpus, 0);
    const state = JSON.stringify([fleet.switches, fleet.loans, lentGpus, disabledReason]);
    if (state === this.actionState) return; // keep buttons in place while the user is about to press one
    this.actionState = state;
    const options = { refused: this.places.refused, acted: () => this.again() };
    const actions = lendingActions({ switches: fleet.switches, loans: fleet.loans, lentGpus, disabledReason });
    put(this.places.actions, actions.map((action) => actionButton(action, options)));
  }
}

/** Returns the shortest span that contains all loans, at most a day. */
function usualSpan(loans, nowS) {
  const oldestS = nowS - Math.min(nowS, ...loans.map((loan) => loan.offered_at_s));
  return SPANS.map(([, span]) => span).find((span) => span >= Math.min(oldestS, USUAL_SPAN_S));
}

function contents(loans, nowS, spanS) {
  const fromS = nowS - spanS;
  const shown = loans.filter((loan) => endOf(loan, nowS) >= fromS);
  if (!shown.length) {
    const idle = "Ebbtide lends a node when the forecast shows that inference does not need it for long enough.";
    const further = "Choose a longer period at the top of this page.";
    return card("Timeline", empty("No loans in this period", loans.length ? further : idle));
  }
  const byNode = new Map();
  for (const loan of shown) byNode.set(loan.node, [...(byNode.get(loan.node) ?? []), loan]);
  const lanes = [...byNode].sort(([a], [b]) => byName.compare(a, b));
  const more = lanes.length - LANES_MAX;
  const live = shown.filter((loan) => loan.is_live).length;
  const total = plural(shown.length, "loan");
  const description = `${plural(live, "node")} lent now, ${total} in the last ${duration(spanS)}`;
  const others = more > 0 && el("p", { class: "small muted" }, `and ${plural(more, "more node")}`);
  const drawn = timeline(lanes.slice(0, LANES_MAX), fromS, nowS);
  const rest = shown.length - ROWS_MAX;
  const before = rest > 0 && el("p", { class: "small muted" }, `and ${plural(rest, "earlier loan")}`);
  return [
    card(["Timeline", el("span", { class: "small muted" }, description)], legend(), drawn, others),
    card("Loans", loanTable(shown, nowS), before),
  ];
}

function endOf(loan, nowS) {
  return loan.is_live ? nowS : loan.state_since_s;
}

function beginOf(loan) {
  return loan.proposed_at_s ?? loan.offered_at_s;
}

/** Returns the periods of a loan: [state, from, to]. Old loans have no times of lending and recall. */
function periods(loan, nowS) {
  const end = endOf(loan, nowS);
  const recalled = loan.recalled_at_s ?? (loan.state === "recalled" ? loan.state_since_s : end);
  const lent = loan.lent_at_s ?? (loan.state === "offered" ? end : loan.offered_at_s);
  const before = [["offered", loan.offered_at_s, lent], ["active", lent, recalled]];
  const all = [...before, ["recalled", recalled, end]];
  const lost = loan.state === "lost" ? [["lost", end, end]] : [];
  return [...all.filter(([, from, to]) => to > from), ...lost];
}

function timeline(lanes, fromS, nowS) {
  const share = (atS) => Math.min(100, Math.max(0, (100 * (atS - fromS)) / (nowS - fromS)));
  const word = Object.fromEntries(KINDS);
  const spans = (loan) => periods(loan, nowS).map(([state, begin, end]) => {
    const until = loan.is_live && end === nowS ? "now" : time(end);
    const description = `${loan.node} ${word[state]}: ${time(begin)} to ${until}, ${duration(Math.round(end - begin))}`;
    const vars = { "--from": `${share(begin)}%`, "--width": `${share(end) - share(begin)}%` };
    return el("span", { class: "span", title: description, data: { state }, vars });
  });
  const lane = ([node, loans]) => {
    const track = el("div", { class: "track" }, loans.flatMap(spans));
    return el("div", { class: "lane" }, el("span", { title: node }, node), track);
  };
  const at = (part) => timeToMinute(fromS + part * (nowS - fromS));
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => el("span", {}, part === 1 ? "now" : at(part)));
  const axis = el("div", { class: "lane" }, el("span"), el("div", { class: "axis" }, ticks));
  const label = "Loans over time; the table below has the same data";
  return el("div", { class: "timeline", tabindex: "0", role: "img", "aria-label": label }, lanes.map(lane), axis);
}

function legend() {
  const swatch = (state) => el("span", { class: "swatch span-swatch", data: { state } });
  return el("ul", { class: "legend" }, KINDS.map(([state, name]) => el("li", {}, swatch(state), name)));
}

function loanTable(loans, nowS) {
  const known = (atS) => (atS ? when(atS) : "–");
  const rows = loans.slice(0, ROWS_MAX).map((loan) => [
    el("a", { href: `#/nodes/${encodeURIComponent(loan.node)}` }, loan.node),
    el("a", { href: `#/pools/${encodeURIComponent(loan.pool)}` }, loan.pool),
    badge(loan.state, loan.state === "active" ? "lent" : loan.state),
    loanGpus(loan),
    when(loan.offered_at_s),
    known(loan.lent_at_s),
    known(loan.recalled_at_s),
    loan.is_live ? (loan.return_by_s ? ["by ", due(loan.return_by_s)] : "–") : when(loan.state_since_s),
    duration(Math.round(endOf(loan, nowS) - beginOf(loan))),
  ]);
  const times = ["Offered", "Lent", "Recalled", "Returned", "Duration"].map((name) => [name, true]);
  return table("Loans", [["Node"], ["Pool"], ["State"], ["Size"], ...times], rows);
}
