// The problems of the service: requested once for the badge in the navigation, the strip and the alerts page.

import { get } from "./api.js";
import { announce } from "./dialogs.js";
import { el } from "./dom.js";
import { count } from "./format.js";
import { keepUp } from "./live.js";
import { countUrgent, takeNewCritical } from "./problem_groups.js";

const EVERY_S = 10;
const TELLING = /^(Node|Loan|Lending|Demand|Breach|Pool|Queue)/;
const STATES = new Set(["failed", "queued", "planning"]);
/** @type {Set<(latest: {problems: any, error: any}) => void>} */
const listeners = new Set();
const announced = new Set();
let latest = { problems: null, error: null };

/** Starts to follow the problems, and shows their number in the link to the alerts page within `navigation`. */
export function startProblems(navigation) {
  const signal = new AbortController().signal;
  const wants = (event) => TELLING.test(event.code) || (event.code === "JobState" && STATES.has(event.job?.state));
  const refresh = async () => hear({ problems: await get("/v1/problems", { signal }), error: null });
  const failed = (error) => error && hear({ problems: latest.problems, error });
  const mark = () => showBadge(navigation);
  listeners.add(mark);
  new MutationObserver(mark).observe(navigation, { childList: true, subtree: true });
  keepUp(refresh, { signal, everyS: EVERY_S, wants, failed });
}

/**
 * Calls `listen` with the latest answer, if there is one, and with each later one until `signal` aborts.
 * @param {(latest: {problems: any, error: any}) => void} listen
 * @param {AbortSignal} signal
 */
export function onProblems(listen, signal) {
  listeners.add(listen);
  signal.addEventListener("abort", () => listeners.delete(listen));
  if (latest.problems || latest.error) listen(latest);
}

function hear(next) {
  latest = next;
  for (const listen of listeners) listen(latest);
  if (next.error) return;
  for (const problem of takeNewCritical(announced, next.problems.items)) {
    announce(problem.code, `Critical: ${problem.cause}`);
  }
}

/** Adds the number to the link, or removes it. Changes nothing if it is right, because the observer hears of it. */
function showBadge(navigation) {
  const link = navigation.querySelector('a[href="#/alerts"]');
  if (!link || !latest.problems) return;
  const { severities } = latest.problems;
  const number = countUrgent(severities);
  const old = link.querySelector(".tally");
  const state = number ? `${number} ${severities.critical > 0}` : "";
  if ((old?.dataset.state ?? "") === state) return;
  old?.remove();
  if (!number) return;
  const severity = severities.critical ? "critical" : "warning";
  const unseen = el("span", { class: "unseen" }, number === 1 ? " problem" : " problems");
  link.append(el("span", { class: "tally", data: { severity, state } }, count(number), unseen));
}
