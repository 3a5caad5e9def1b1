// Groups of problems, their titles and links, and what is announced.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as groups from "../../../api/console/static/problem_groups.js";

const { countUrgent, groupProblems, pageOf, takeNewCritical } = groups;

const problem = (code, subject, severity = "warning", more = {}) => ({
  code, subject, severity, kind: "job", cause: `cause of ${subject}`, advice: "", command: "", since_s: null,
  meaning: "", runbook: "", ...more,
});
const view = (items, counts) => ({ items, counts, severities: {} });

test("one problem keeps its sentence, several of a code become one entry", () => {
  const items = [problem("NodeDown", "t1"), problem("JobFailed", "a", "warning", { since_s: 20 }),
    problem("JobFailed", "b", "warning", { since_s: 10 })];
  const found = groupProblems(view(items, { NodeDown: 1, JobFailed: 2 }));
  assert.deepEqual(found.map((each) => [each.title, each.count, each.since_s]), [
    ["cause of t1", 1, null],
    ["2 jobs failed in the last 24 hours", 2, 10],
  ]);
});

test("problems that the service counted but did not list belong to the group", () => {
  const [found] = groupProblems(view([problem("JobFailed", "a")], { JobFailed: 342 }));
  assert.equal(found.count, 342);
  assert.equal(found.title, "342 jobs failed in the last 24 hours");
});

test("severities of one code are separate entries, and the total stays that of the service", () => {
  const items = [problem("InferenceShort", "a", "critical"), problem("InferenceShort", "b")];
  const found = groupProblems(view(items, { InferenceShort: 2 }));
  assert.deepEqual(found.map((each) => [each.severity, each.count]), [["critical", 1], ["warning", 1]]);
});

test("subjects have pages, the service has none", () => {
  assert.equal(pageOf(problem("JobFailed", "a/b")), "#/jobs/a%2Fb");
  assert.equal(pageOf({ code: "ControllerMissing", kind: "service", subject: "" }), "");
  assert.equal(pageOf({ code: "LendingStopped", kind: "service", subject: "" }), "#/loans");
});

test("the badge counts what costs something now", () => {
  assert.equal(countUrgent({ critical: 2, warning: 3, notice: 4 }), 5);
});

test("a critical problem is new once, and again after it ended", () => {
  const known = new Set();
  const late = [problem("RecallLate", "i3", "critical"), problem("JobFailed", "a")];
  assert.deepEqual(takeNewCritical(known, late).map((each) => each.subject), ["i3"]);
  assert.deepEqual(takeNewCritical(known, late), []);
  takeNewCritical(known, []);
  assert.equal(takeNewCritical(known, late).length, 1);
});
