// Alerts page: the problems of now by severity, those that have ended, and the alert rules that come with the service.

import { get } from "../api.js";
import { problemNote } from "../dialogs.js";
import { card, el, empty, put, redraw, say } from "../dom.js";
import { plural } from "../format.js";
import { keepUp } from "../live.js";
import { onProblems } from "../problem_feed.js";
import { groupProblems, SEVERITIES, SEVERITY_WORDS } from "../problem_groups.js";
import { openGroups, problemList, severityMark } from "../problem_strip.js";
import { ResolvedProblems } from "../resolved_problems.js";

const CONSEQUENCES = {
  critical: "A promise to inference is broken, or nothing is scheduled. Act now.",
  warning: "Work or capacity is being lost. Act today.",
  notice: "Nothing is lost, but a state may have been forgotten.",
};
const COUNTS = {
  critical: (number) => plural(number, "critical problem"),
  warning: (number) => plural(number, "warning"),
  notice: (number) => plural(number, "notice"),
};
const RESOLVED_EVERY_S = 60;
const RECEIVERS = { critical: "pages a person", warning: "opens a ticket" };

export const title = () => "Alerts";

export async function show(root, { signal }) {
  const page = new AlertsPage(root, signal);
  onProblems((latest) => page.draw(latest), signal);
  const failed = (error) => error && page.failed(error);
  keepUp(() => page.resolved.refresh(), { signal, everyS: RESOLVED_EVERY_S, wants: () => false, failed });
  try {
    page.drawRules((await get("/v1/alert-rules", { signal })).items);
  } catch (error) {
    if (!signal.aborted) page.failed(error);
  }
}

class AlertsPage {
  constructor(root, signal) {
    this.resolved = new ResolvedProblems(signal);
    this.summary = el("p", { class: "muted" }, "Loading …");
    this.places = { refused: el("div"), problems: el("div", { class: "stack" }), rules: el("div", { class: "stack" }) };
    const head = el("div", { class: "head" }, el("div", { class: "grow" }, el("h1", {}, "Alerts"), this.summary));
    const { refused, problems, rules } = this.places;
    put(root, head, el("div", { class: "stack" }, refused, problems, this.resolved.place, rules));
  }

  failed(error) {
    put(this.places.refused, problemNote(error));
  }

  draw({ problems, error }) {
    put(this.places.refused, error && problemNote(error));
    if (!problems) return;
    const { severities } = problems;
    const counts = SEVERITIES.filter((each) => severities[each]).map((each) => COUNTS[each](severities[each]));
    say(this.summary, counts.length ? `Now: ${counts.join(", ")}.` : "All is well.");
    redraw(this.places.problems, JSON.stringify([problems.items, problems.counts]), () => this.#problemCards(problems));
  }

  drawRules(rules) {
    const paging = rules.filter((rule) => rule.severity === "critical").length;
    const counts = el("span", { class: "small muted" }, `${plural(rules.length, "rule")}, ${paging} of which page`);
    put(this.places.rules, card(["Alert rules for Prometheus", counts], rulesNote(), rulesList(rules)));
  }

  #problemCards(problems) {
    if (!problems.items.length) {
      const text = "Jobs, nodes, queues, lending and the controller are checked with every change of the fleet.";
      return [card("Problems", empty("There are no problems", text))];
    }
    const groups = groupProblems(problems);
    const open = openGroups(this.places.problems);
    return SEVERITIES.map((severity) => {
      const mine = groups.filter((group) => group.severity === severity);
      const note = el("span", { class: "small muted" }, CONSEQUENCES[severity]);
      return mine.length > 0 && card([SEVERITY_WORDS[severity], note], problemList(mine, open));
    });
  }
}

function rulesNote() {
  const command = el("code", {}, "ebbtide assets export");
  const text = ["The Helm chart installs these rules; ", command, " writes them for another Prometheus. "];
  const routes = "Your Alertmanager decides by the label severity which of them page a person.";
  return el("p", { class: "small muted" }, text, routes);
}

function rulesList(rules) {
  const entries = rules.map((rule) => el("li", { data: { severity: rule.severity } },
    el("a", { href: rule.runbook }, rule.name),
    el("span", {}, severityMark(rule.severity), el("span", { class: "small muted" }, RECEIVERS[rule.severity] ?? "")),
    el("p", {}, rule.summary, el("span", { class: "small muted" }, firing(rule.pending)))));
  return el("ul", { class: "rules", "aria-label": "Alert rules" }, entries);
}

/** Says when a rule fires: 0m becomes "Fires at once.", 15m "Fires after 15 min." */
function firing(pending) {
  if (pending === "0m") return " Fires at once.";
  return ` Fires after ${pending.replace(/(?<=\d)m$/, " min").replace(/(?<=\d)h$/, " h")}.`;
}
