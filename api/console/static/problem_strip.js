// The strip of problems above the overview, which is absent when all is well, and the entries of problems.

import { problemNote } from "./dialogs.js";
import { copyButton, el, put, svg } from "./dom.js";
import { plural } from "./format.js";
import { onProblems } from "./problem_feed.js";
import { groupProblems, keyOf, pageOf, SEVERITY_WORDS } from "./problem_groups.js";
import { age } from "./times.js";

const STRIP_GROUPS_MAX = 5;
const ALIKE_MAX = 20;
const SHAPES = {
  critical: "M8 1 15 8 8 15 1 8Z M8 4.6V8.6 M8 11V11.2",
  warning: "M8 1.8 15 14.2H1Z M8 6.2V9.8 M8 11.8V12",
  notice: "M8 1.2A6.8 6.8 0 1 0 8 14.8 6.8 6.8 0 1 0 8 1.2Z M8 7.2V11.4 M8 4.6V4.8",
};

/** The strip. It waits with changes while the pointer or the focus is in it, so that nothing moves while it is read. */
export class ProblemStrip {
  /** @param {AbortSignal} signal */
  constructor(signal) {
    this.place = el("div", { class: "stack" });
    this.shown = "";
    this.pending = null;
    for (const kind of ["pointerleave", "focusout"]) this.place.addEventListener(kind, () => this.#settle());
    onProblems((latest) => this.#hear(latest), signal);
  }

  #hear(latest) {
    const isRead = this.shown && this.place.matches(":hover, :focus-within");
    if (isRead) this.pending = latest;
    else this.#draw(latest);
  }

  #settle() {
    setTimeout(() => this.pending && !this.place.matches(":hover, :focus-within") && this.#draw(this.pending));
  }

  #draw(latest) {
    this.pending = null;
    const key = JSON.stringify([latest.problems?.items, latest.problems?.counts, String(latest.error ?? "")]);
    if (key === this.shown) return;
    this.shown = key;
    put(this.place, latest.error ? problemNote(latest.error) : null, stripOf(latest.problems, openGroups(this.place)));
  }
}

/** Returns the strip, or null if there is no problem. */
function stripOf(problems, open) {
  if (!problems?.items.length) return null;
  const groups = groupProblems(problems);
  const rest = groups.slice(STRIP_GROUPS_MAX).map((group) => group.title.replace(/\.$/, ""));
  const more = rest.length > 0 && ["Also: ", el("a", { href: "#/alerts" }, rest.join("; ")), "."];
  const list = problemList(groups.slice(0, STRIP_GROUPS_MAX), open);
  return el("section", { class: "problems", "aria-label": "Problems" }, list, more && el("p", { class: "rest" }, more));
}

/** Returns the keys of the groups that are expanded in `place`. */
export function openGroups(place) {
  return new Set([...place.querySelectorAll("details[open]")].map((each) => each.dataset.key));
}

/** A list of groups of problems. `open`: keys of the groups that are expanded. */
export function problemList(groups, open = new Set()) {
  return el("ul", { class: "problem-list" }, groups.map((group) => groupEntry(group, open)));
}

function groupEntry(group, open) {
  const [first] = group.items;
  const since = group.since_s !== null && el("span", { class: "since" }, "since ", age(group.since_s, "for"));
  const text = group.count === 1 ? single(first) : several(group, open.has(group.key));
  return el("li", { data: { severity: group.severity, code: group.code } }, severityMark(group.severity), text, since);
}

/** The icon and the word of a severity. */
export function severityMark(severity) {
  const icon = svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: SHAPES[severity] }));
  return el("span", { class: "severity" }, icon, SEVERITY_WORDS[severity]);
}

function single(problem) {
  return el("div", {}, el("p", { class: "cause" }, causeLink(problem)), help(problem));
}

function several(group, isOpen) {
  const [first] = group.items;
  const rows = group.items.slice(0, ALIKE_MAX).map((item) => el("li", { data: { key: keyOf(item) } }, causeLink(item)));
  const rest = group.count - rows.length;
  const summary = el("summary", {}, group.title);
  const list = el("ul", {}, rows, rest > 0 && el("li", { class: "muted" }, `and ${plural(rest, "more", "more")}`));
  const details = el("details", { open: isOpen, data: { key: group.key } }, summary, list);
  return el("div", {}, details, help({ ...first, command: "" })); // each subject has a command of its own
}

/** The sentence, which links to the page of its subject if there is one. */
export function causeLink(problem) {
  const page = pageOf(problem);
  return page ? el("a", { href: page }, problem.cause) : problem.cause;
}

/** What helps: a sentence, a command with a button that copies it, and the section of the runbook. */
function help(problem) {
  const command = problem.command && [
    el("code", {}, problem.command),
    copyButton(`command ${problem.command}`, problem.command),
  ];
  const runbook = el("a", { href: problem.runbook, "aria-label": `Runbook about ${problem.code}` }, "Runbook");
  return el("p", { class: "help" }, el("span", {}, problem.advice), command, runbook);
}
