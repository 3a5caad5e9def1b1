// Groups of the navigation, and pages that a user may open.

import assert from "node:assert/strict";
import { test } from "node:test";

import { groupPages } from "../../../api/console/static/navigation.js";

const PAGES = [
  { name: "Audit", href: "#/audit", group: "Administration", role: "admin" },
  { name: "Webhooks", href: "#/webhooks", group: "Administration", role: "queue-admin" },
  { name: "Overview", href: "#/", group: "Fleet" },
  { within: "#/jobs" },
];

/** Returns the names by group as a user with `grants` sees them. */
const named = (grants) => {
  const groups = groupPages(PAGES, grants && { name: "anna", grants });
  return groups.map(([group, pages]) => [group, pages.map((page) => page.name)]);
};

test("groups have an order of their own and none is empty", () => {
  assert.deepEqual(named(["admin"]), [["Fleet", ["Overview"]], ["Administration", ["Audit", "Webhooks"]]]);
});

test("a role on one queue is enough for a page of that role", () => {
  assert.deepEqual(named(["queue-admin:research"]), [["Fleet", ["Overview"]], ["Administration", ["Webhooks"]]]);
});

test("pages with a role are left out while the user is unknown or lacks it", () => {
  for (const grants of [null, ["viewer"], ["submitter:research"]]) {
    assert.deepEqual(named(grants), [["Fleet", ["Overview"]]]);
  }
});
