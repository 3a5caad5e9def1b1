// Loans over time: each node that was lent is a lane, each loan a span of it.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, card, el, empty, put, table } from "../dom.js";
import { ago, duration, plural, time } from "../format.js";
import { lendingLevers, leverButton } from "../levers.js";
import { keepUp } from "../live.js";

const LANES_MAX = 120;
const ROWS_MAX = 60;
const LOANS_MAX = 500;
const SPANS = [["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["7 d", 604800]];
const byName = new Intl.Collator("en", { numeric: true });

export const title = () => "Loans";

export async function show(root, { signal }) {
  const places = { levers: el("div", { class: "row" }), body: el("div", { class: "stack" }), refused: el("div", {}) };
  const view = { spanS: SPANS[1][1], told: null };
  const choose = (event) => {
    view.spanS = Number(event.target.value);
    if (view.told) draw();
  };
  const options = SPANS.map(([name, value]) => el("option", { value, selected: value === view.spanS }, name));
  const span = el("label", { class: "row small" }, "Last", el("select", { on: { change: choose } }, options));
  const draw = () => put(places.body, contents(view));
  const refresh = async () => {
    const [page, fleet] = await Promise.all([get("/v1/loans", { query: { limit: LOANS_MAX }, signal }), get("/v1/overview", { query: { generation: view.fleet?.generation }, signal })]);
    Object.assign(view, { told: page.items, nowS: fleet.now_s, fleet });
    draw();
    levers(places, fleet, page.items, again);
  };
  put(root, el("div", { class: "head" }, el("h1", { class: "grow" }, "Loans"), span, places.levers), el("div", { class: "stack" }, places.refused, places.body));
  const again = keepUp(refresh, { signal, wants: (event) => /^(Node|Loan|Lending)/.test(event.code), failed: (error) => put(places.refused, error && problemNote(error)) });
}

function levers(places, fleet, loans, again) {
  const state = JSON.stringify([fleet.switches, fleet.loans]);
  if (state === places.state) return;
  places.state = state;
  const lentNodes = new Set(loans.filter((loan) => loan.state === "active" || loan.state === "recalled").map((loan) => loan.node));
  const sizes = fleet.pools.filter((pool) => pool.kind === "inference").map((pool) => pool.gpus / Math.max(1, pool.nodes));
  const lentGpus = Math.round(lentNodes.size * (sizes.length ? Math.max(...sizes) : 0));
  const options = { refused: places.refused, acted: () => again() };
  put(places.levers, lendingLevers({ switches: fleet.switches, loans: fleet.loans, lentGpus }).map((lever) => leverButton(lever, options)));
}

function contents({ told, nowS, spanS }) {
  const fromS = nowS - spanS;
  const shown = told.filter((loan) => endOf(loan, nowS) >= fromS);
  if (!shown.length) {
    const hint = told.length ? "Look further back, at the top of this page." : "A node is lent when the forecast says that inference can do without it for long enough.";
    return card("Timeline", empty("No loans in this time", hint));
  }
  const lanes = Object.entries(Object.groupBy?.(shown, (loan) => loan.node) ?? grouped(shown)).sort(([a], [b]) => byName.compare(a, b));
  const live = shown.filter((loan) => loan.is_live);
  const more = lanes.length - LANES_MAX;
  const words = `${plural(live.length, "node")} on loan now, ${plural(shown.length, "loan")} in the last ${duration(spanS)}`;
  return [
    card(["Timeline", el("span", { class: "small muted" }, words)], legend(), timeline(lanes.slice(0, LANES_MAX), fromS, nowS), more > 0 && el("p", { class: "small muted" }, `and ${plural(more, "node")} more`)),
    card("Loans", loanTable(shown, nowS), shown.length > ROWS_MAX && el("p", { class: "small muted" }, `and ${plural(shown.length - ROWS_MAX, "loan")} before`)),
  ];
}

function grouped(loans) {
  const lanes = {};
  for (const loan of loans) (lanes[loan.node] ??= []).push(loan);
  return lanes;
}

function endOf(loan, nowS) {
  return loan.is_live ? nowS : loan.state_since_s;
}

function timeline(lanes, fromS, nowS) {
  const share = (atS) => Math.min(100, Math.max(0, (100 * (atS - fromS)) / (nowS - fromS)));
  const spans = (loan) => {
    const changes = loan.state === "recalled" ? [["active", loan.offered_at_s, loan.state_since_s], ["recalled", loan.state_since_s, nowS]] : [[loan.state, loan.offered_at_s, endOf(loan, nowS)]];
    return changes.map(([state, begin, end]) => {
      const told = `${loan.node} ${state}: ${time(begin)} to ${loan.is_live && end === nowS ? "now" : time(end)}, ${duration(Math.round(end - begin))}`;
      return el("span", { class: "span", title: told, data: { state }, vars: { "--from": `${share(begin)}%`, "--width": `${share(end) - share(begin)}%` } });
    });
  };
  const lane = ([node, loans]) => el("div", { class: "lane" }, el("span", { title: node }, node), el("div", { class: "track" }, loans.flatMap(spans)));
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((at) => el("span", {}, at === 1 ? "now" : time(fromS + at * (nowS - fromS)).replace(/:\d\d$/, "")));
  const axis = el("div", { class: "lane" }, el("span"), el("div", { class: "axis" }, ticks));
  return el("div", { class: "timeline", tabindex: "0", role: "img", "aria-label": "Loans over time; the table below has the same" }, lanes.map(lane), axis);
}

function legend() {
  const kinds = [["offered", "offered"], ["active", "lent"], ["recalled", "recalled"], ["returned", "returned"], ["lost", "node lost"]];
  return el("ul", { class: "legend" }, kinds.map(([state, name]) => el("li", {}, el("span", { class: "swatch span-swatch", data: { state } }), name)));
}

function loanTable(loans, nowS) {
  const rows = loans.slice(0, ROWS_MAX).map((loan) => [
    loan.node,
    loan.pool,
    badge(loan.state, loan.state === "active" ? "lent" : loan.state),
    time(loan.offered_at_s, nowS),
    duration(Math.round(endOf(loan, nowS) - loan.offered_at_s)),
    loan.return_by_s ? `${time(loan.return_by_s, nowS)} (${ago(loan.return_by_s, nowS)})` : "–",
  ]);
  return table("Loans", [["Node"], ["Pool"], ["State"], ["Offered", true], ["For", true], ["Home by", true]], rows);
}
