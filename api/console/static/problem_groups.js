// Groups of alike problems, their titles and links. No document, so that tests run in Node.

import { count, words } from "./format.js";

export const SEVERITIES = ["critical", "warning", "notice"];
export const SEVERITY_WORDS = { critical: "Critical", warning: "Warning", notice: "Notice" };

/** Titles of groups by code. Codes without one cannot have two subjects, or get a general title. */
const TITLES = {
  NodeDown: "nodes are down",
  NodeQuarantined: "nodes are quarantined",
  NodeSlow: "nodes slow running jobs",
  AgentSilent: "machines have a silent agent",
  RecallLate: "recalled nodes are past their deadline",
  RecallAtRisk: "recalled nodes are still held shortly before their deadline",
  InferenceShort: "pools have less inference capacity than they need",
  DemandLost: "pools have lost their demand",
  DemandStale: "pools have an old demand reading",
  DemandMissing: "pools have no demand reading",
  ForecastMissing: "pools have no current forecast",
  GuaranteeUnserved: "queues wait for guaranteed GPUs",
  QueueStuck: "queues start nothing although GPUs are free",
  JobOutOfMemory: "jobs ran out of memory repeatedly",
  JobThrashing: "jobs are interrupted too often",
  JobLosesWork: "jobs lose much of their work",
  JobFailed: "jobs failed in the last 24 hours",
  WebhookFailing: "webhooks fail",
};

const PAGES = {
  job: (subject) => `#/jobs/${encodeURIComponent(subject)}`,
  node: (subject) => `#/nodes/${encodeURIComponent(subject)}`,
  machine: (subject) => `#/nodes/${encodeURIComponent(subject)}`,
  queue: (subject) => `#/queues/${encodeURIComponent(subject)}`,
  pool: (subject) => `#/pools/${encodeURIComponent(subject)}`,
  webhook: () => "#/webhooks",
};

/**
 * @typedef {{code: string, severity: string, kind: string, subject: string, cause: string, advice: string,
 * command: string, since_s: number | null, meaning: string, runbook: string}} Problem
 * @typedef {{counts: Record<string, number>, severities: Record<string, number>, items: Problem[]}} Problems
 * @typedef {{key: string, code: string, severity: string, items: Problem[], count: number, title: string,
 * since_s: number | null}} Group
 */

/**
 * Groups problems of one code and severity, in the order of the service. `count` includes those that it did not list.
 * @param {Problems} problems
 * @returns {Group[]}
 */
export function groupProblems(problems) {
  /** @type {Map<string, Problem[]>} */
  const byKey = new Map();
  for (const item of problems.items) {
    const key = `${item.severity} ${item.code}`;
    byKey.set(key, [...(byKey.get(key) ?? []), item]);
  }
  const listed = new Map();
  for (const { code } of problems.items) listed.set(code, (listed.get(code) ?? 0) + 1);
  const groups = [...byKey].map(([key, items]) => {
    const [{ code, severity }] = items;
    const unlisted = problems.counts[code] - listed.get(code);
    listed.set(code, problems.counts[code]); // those that are not listed belong to the first group of the code
    const number = items.length + unlisted;
    const times = items.map((item) => item.since_s).filter((at) => at !== null);
    const since = times.length ? Math.min(...times) : null;
    return { key, code, severity, items, count: number, title: titleOf(code, number, items), since_s: since };
  });
  return groups;
}

function titleOf(code, number, items) {
  if (number === 1) return items[0].cause;
  return `${count(number)} ${TITLES[code] ?? `problems: ${words(code).toLowerCase()}`}`;
}

/**
 * Returns the console page of a problem's subject, or "" if there is none.
 * @param {{kind: string, subject: string, code: string}} problem
 */
export function pageOf({ kind, subject, code }) {
  if (code === "LendingStopped") return "#/loans";
  return PAGES[kind]?.(subject) ?? "";
}

/** Returns the number on the badge of the navigation: problems that cost something now. */
export function countUrgent(severities) {
  return (severities.critical ?? 0) + (severities.warning ?? 0);
}

/** Identifies a problem between two answers. */
export function keyOf({ code, kind, subject }) {
  return `${code} ${kind} ${subject}`;
}

/**
 * Returns the critical problems that were not among `known`, and adds them. Those that have ended are removed, so that
 * they are announced again if they come back.
 * @param {Set<string>} known
 * @param {Problem[]} items
 */
export function takeNewCritical(known, items) {
  const critical = items.filter((item) => item.severity === "critical");
  const keys = new Set(critical.map(keyOf));
  const fresh = critical.filter((item) => !known.has(keyOf(item)));
  for (const key of known) if (!keys.has(key)) known.delete(key);
  for (const key of keys) known.add(key);
  return fresh;
}
