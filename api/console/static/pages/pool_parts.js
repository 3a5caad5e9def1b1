// Sections of the pool page.

import { actionButton } from "../actions.js";
import { badge, el, empty, facts, table } from "../dom.js";
import { bytes, count, duration, figure, gpus, gpuTime, percent, plural, words } from "../format.js";
import { vetoAction } from "../node_actions.js";
import { due, when } from "../times.js";

const DAY_S = 86_400;
const WINDOW_COLUMNS = [["No new loans"], ["Duration"], ["Time zone"]];
const EVENT_COLUMNS = [["Event"], ["Begin"], ["Duration"], ["Demand"]];

/** The obstacle to a new loan, what changes it, and the numbers by which the policy decides. */
export function explanationParts(found) {
  const wanted = Object.entries(found.wanted).filter(([, each]) => each.jobs);
  const { switches } = found;
  const setBy = switches.set_by ? ` by ${switches.set_by}` : "";
  const paused = switches.loans_recalled ? "all loans recalled" : switches.lending_paused ? "paused" : "";
  return [
    el("p", {}, el("strong", {}, `${words(found.code)}. `), found.summary),
    el("p", {}, found.lever),
    facts([
      ["Capacity", gpus(found.capacity_gpus)],
      ["Observed demand", found.observed_gpus === null ? "no reading" : `${figure(found.observed_gpus)} GPUs`],
      ["Age of the reading", found.demand_age_s === null ? "" : duration(Math.round(found.demand_age_s))],
      ["Forecast", forecastText(found)],
      ["Headroom", `${figure(found.headroom_gpus)} GPUs`],
      ["Nodes that stay", count(found.kept_nodes_min)],
      ["Lent nodes", `${count(found.lent_nodes)}${atMost(found.lent_nodes_max)}`],
      ["Lent GPUs", `${count(found.lent_gpus)} of at most ${count(found.lasting_gpus)}`],
      ["Possible loans now", count(found.lendable_nodes)],
      ["For the shortest loan", count(found.lasting_nodes)],
      ["Cordoned", found.cordoned_nodes ? `${plural(found.cordoned_nodes, "node")}, ${gpus(found.cordoned_gpus)}` : ""],
      ["Lendable GPUs in use", found.partly_used_nodes ? plural(found.partly_used_nodes, "node") : ""],
      ["Vetoed", found.vetoed_nodes ? plural(found.vetoed_nodes, "node") : ""],
      ["Jobs that could use more", wanted.map(wantedText).join(", ") || "none"],
      ["In a blackout", found.in_blackout ? "yes" : "no"],
      ["Switch", paused && `${paused}${setBy}`],
      ["Next decision", due(found.next_full_pass_at_s)],
    ]),
  ];
}

function atMost(limit) {
  return limit === null ? "" : ` of at most ${count(limit)}`;
}

function wantedText([gpu, { jobs, gpus: wanted }]) {
  return `${plural(jobs, "job")}, ${figure(wanted)} × ${gpu}`;
}

function forecastText({ forecast_gpus: forecast, quantile, is_calibrated: isCalibrated }) {
  if (forecast === null) return "too few readings";
  return `${figure(forecast)} GPUs at quantile ${quantile}${isCalibrated ? "" : ", not calibrated yet"}`;
}

/** Proposed loans with their veto. Null if there are none. */
export function proposals(loans, { vetoS, disabledReason, refused, acted }) {
  if (!loans.length) return null;
  const row = (loan) => [
    nodeLink(loan.node),
    loan.proposed_at_s ? when(loan.proposed_at_s) : "–",
    due(loan.offered_at_s),
    actionButton({ ...vetoAction(loan, vetoS), disabledReason }, { refused, acted }),
  ];
  return table("Proposed loans", [["Node"], ["Proposed"], ["Offered"], [""]], loans.map(row));
}

export function shadowFacts(shadow) {
  const short = `${count(shadow.short_intervals)} of ${count(shadow.intervals)} five-minute intervals`;
  return [
    el("p", { class: "muted" }, "No node is lent. These loans would have been made:"),
    facts([
      ["Since", when(shadow.since_s)],
      ["On loan now", shadow.nodes.length ? `${shadow.nodes.join(", ")} (${figure(shadow.gpus)} GPUs used)` : "none"],
      ["GPU-hours", figure(shadow.gpu_hours)],
      ["Loans", `${count(shadow.loans)}, ${count(shadow.recalls)} ended by a recall`],
      ["Inference short", short],
    ]),
  ];
}

/** The promise to the pool: shortages of four weeks, and the verdict of this month. */
export function promise(shortages, report) {
  const realised = shortages.intervals ? percent(shortages.short_intervals / shortages.intervals) : "–";
  const outcomes = Object.entries(report.outcomes).filter(([, number]) => number);
  const times = report.return_times;
  const intervals = `${count(shortages.short_intervals)} of ${count(shortages.intervals)} intervals`;
  const target = shortages.target === null ? "none: a quantile is fixed"
    : `short at most ${percent(shortages.target)} of the time`;
  return [
    el("p", {}, badge(report.verdict, words(report.verdict.replace("_", " ")))),
    el("p", {}, report.summary),
    facts([
      ["Target", target],
      ["Realised in four weeks", `${realised} (${intervals})`],
      ["Budget left", shortages.budget_left === null ? "" : percent(shortages.budget_left)],
      ["Lent this month", `${plural(report.loans, "loan")}, ${figure(report.lent_gpu_hours)} GPU-hours`],
      ["Recalls this month", [plural(report.recalls, "recall"), ...outcomes.map(outcomeText)].join(", ")],
      ["Median time to return", times && duration(times.p50_s)],
      ["95% return within", times && duration(times.p95_s)],
      ["Longest return", times && duration(times.max_s)],
      ["Work lost by leaving", `${figure(report.lost_gpu_hours)} GPU-hours`],
    ]),
  ];
}

function outcomeText([outcome, number]) {
  return `${count(number)} ${outcome.replace("_", " ")}`;
}

export function wayBackFacts({ way_back: way, lending }) {
  const measured = (seconds, usual) => `${duration(seconds)}${seconds === usual ? ", as set" : ", measured"}`;
  return [
    facts([
      ["Training leaves", measured(way.leave_s, lending.return_deadline_s)],
      ["A replica starts", measured(way.start_s, lending.cold_start_s)],
      ["Forecasts look ahead", duration(way.horizon_s)],
    ]),
    el("p", { class: "small muted" }, "One of 20 recalls takes longer."),
  ];
}

export function policyFacts(lending) {
  const stale = lending.demand_stale_s;
  const mode = lending.mode === "shadow" ? "shadow: records loans without making them" : "lend";
  return facts([
    ["Lending", lending.enabled ? "on" : "off"],
    ["Mode", mode],
    ["Quantile", `${lending.quantile}${lending.shortage_target === null ? "" : ", adapted to the promise"}`],
    ["Headroom", percent(lending.headroom)],
    ["Return deadline", duration(lending.return_deadline_s)],
    ["Cold start", duration(lending.cold_start_s)],
    ["Nodes that stay", count(lending.kept_nodes_min)],
    ["Most lent nodes", lending.lent_nodes_max === null ? "no limit" : count(lending.lent_nodes_max)],
    ["Shortest loan", duration(lending.loan_s_min)],
    ["Notice of a loan", lending.notice_s ? duration(lending.notice_s) : "none"],
    ["Duration of a veto", duration(lending.veto_s)],
    ["Demand is stale after", stale === null ? "as in the settings" : duration(stale)],
    ["Demand is lost after", lending.demand_lost_s === null ? "" : duration(lending.demand_lost_s)],
  ]);
}

/** Windows without new loans, and known events. */
export function calendar({ blackouts, known_events: events, time_zone: zone, demand_profile: profile }) {
  const window = ({ start_s: start, end_s: end, cron, time_zone: own }) => [
    cron ? el("code", {}, cron) : `${clock(start)} to ${clock(end)} every day`,
    duration(cron ? end - start : (end - start + DAY_S) % DAY_S || DAY_S),
    own || (cron ? zone : "UTC"),
  ];
  const event = (each) => [
    each.name,
    when(each.start_s),
    duration(each.duration_s),
    each.factor === null ? `at least ${figure(each.gpus)} GPUs` : `${figure(each.factor)} × the forecast`,
  ];
  if (!blackouts.length && !events.length && !profile.length) {
    return empty("No blackouts or known events", "Set them with", el("code", {}, "ebbtide pools set --help"));
  }
  return [
    blackouts.length > 0 && table("Windows without new loans", WINDOW_COLUMNS, blackouts.map(window)),
    events.length > 0 && table("Known events", EVENT_COLUMNS, events.map(event)),
    profile.length > 0 && el("p", { class: "small muted" },
      `A demand profile with ${plural(profile.length, "value")} stands in until forecasts are calibrated.`),
  ];
}

function clock(seconds) {
  const part = (value) => String(Math.floor(value)).padStart(2, "0");
  return `${part((seconds / 3600) % 24)}:${part((seconds % 3600) / 60)}`;
}

export function sourceFacts({ demand_source: source, demand }) {
  const newest = facts([["Latest reading", demand && el("span", {}, `${figure(demand.gpus)} GPUs, `, due(demand.at_s))],
    ["Limited", demand?.clamped && `${figure(demand.asked_gpus)} GPUs were reported, more than the capacity`]]);
  if (!source) {
    return [newest, el("p", { class: "small muted" }, "Demand is reported to the API: no source is polled.")];
  }
  const queries = [...source.queries, ...source.requests ?? []];
  const title = (each, at) => each.model ? `Requests for ${each.model}: ${each.preset ?? "PromQL"}`
    : `Query ${at + 1}: ${each.preset ?? each.unit ?? "PromQL"}`;
  const query = (each, at) => el("details", { open: queries.length === 1 },
    el("summary", {}, title(each, at)),
    facts(Object.entries(each).map(([name, value]) =>
      [words(name.replaceAll("_", " ")), el("code", {}, typeof value === "string" ? value : JSON.stringify(value))])));
  return [newest, queries.map(query),
    el("p", { class: "small muted" }, `Readings are stale after ${duration(source.stale_after_s)}.`)];
}

/** Receipts of recalls, newest first. */
export function recallTable(receipts) {
  if (!receipts.length) return empty("No recalls yet", "A recall leaves a receipt with its times, reason and jobs.");
  return el("ol", { class: "record" }, receipts.map((receipt) =>
    el("li", {}, when(receipt.asked_at_s), el("div", {}, recallLine(receipt), recallDetails(receipt)))));
}

function recallLine(receipt) {
  const state = receipt.outcome ?? "recalled";
  const word = receipt.outcome ? receipt.outcome.replace("_", " ") : "open";
  return el("p", {}, nodeLink(receipt.node), " ", badge(state, word), returnText(receipt), `: ${receipt.detail}`);
}

/** Returns how long the return took, or the deadline of an open recall. */
function returnText({ asked_at_s: asked, return_by_s: deadline, returned_at_s: returned, outcome }) {
  const taken = (untilS) => duration(Math.round(untilS - asked));
  if (returned !== null) return `, returned in ${taken(returned)} of ${taken(deadline)}`;
  return outcome === null && [", return by ", due(deadline)];
}

function recallDetails(receipt) {
  const at = (atS) => atS !== null && when(atS);
  const job = (each) => [
    each.queue === null ? each.job_id : el("a", { href: `#/jobs/${each.job_id}` }, each.job_id),
    count(each.gpus),
    each.exit ?? "–",
    each.saved ? "yes" : "no",
    figure(each.lost_steps),
    each.left_at_s === null ? "–" : when(each.left_at_s),
  ];
  const columns = [["Job"], ["GPUs", true], ["Exit"], ["Saved"], ["Lost steps", true], ["Left"]];
  const { choice } = receipt;
  return el("details", {}, el("summary", {}, `Receipt, ${plural(receipt.jobs.length, "job")}`), facts([
    ["Reason", words(receipt.code)],
    ["Nodes recalled together", choice && count(choice.nodes)],
    ["Lent nodes that stayed", choice && count(choice.alternatives)],
    ["Expected loss", choice && gpuTime(choice.cost_gpu_s)],
    ["Order observed", at(receipt.acknowledged_at_s)],
    ["Free of jobs", at(receipt.freed_at_s)],
    ["Returned", at(receipt.returned_at_s)],
    ["Inference serves", at(receipt.serving_at_s)],
  ]), receipt.jobs.length > 0 && table(`Jobs that left ${receipt.node}`, columns, receipt.jobs.map(job)));
}

export function sizeFacts(pool) {
  const { network } = pool;
  return facts([
    ["Nodes", el("a", { href: `#/nodes?pool=${encodeURIComponent(pool.name)}` }, plural(pool.nodes, "node"))],
    ["GPUs", `${gpus(pool.gpus)}, ${count(pool.capacity_gpus)} on nodes that are up`],
    ["Network", network ? `${bytes(network.bandwidth_bytes_per_s)}/s` : "as in the profile of its GPU model"],
    ["Latency", network && duration(network.latency_s)],
    ["Interfaces per node", network && count(network.nics_per_node)],
  ]);
}

function nodeLink(name) {
  return el("a", { href: `#/nodes/${encodeURIComponent(name)}` }, name);
}
