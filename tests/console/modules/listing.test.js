// Filters in the address, and the order of rows.

import assert from "node:assert/strict";
import { test } from "node:test";

import { addressOf, readFilters, sortRows } from "../../../api/console/static/listing.js";

const USUAL = { pool: "", state: "live" };
const COLUMNS = [
  { key: "name", name: "Node", value: (row) => row.name },
  { key: "held", name: "GPUs", value: (row) => row.held },
  { key: "plan", name: "Plan" },
];
const ROWS = [{ name: "t10", held: 4 }, { name: "t2", held: null }, { name: "t1", held: 8 }];
const sorted = (sort) => sortRows(ROWS, COLUMNS, sort).map((row) => row.name);

test("an address has the filters that are not usual", () => {
  assert.equal(addressOf("/nodes", USUAL, USUAL), "#/nodes");
  assert.equal(addressOf("/nodes", { pool: "a b", state: "" }, USUAL), "#/nodes?pool=a+b&state=");
  assert.deepEqual(readFilters(new URLSearchParams("pool=a+b&state="), USUAL), { pool: "a b", state: "" });
  assert.deepEqual(readFilters(new URLSearchParams("other=1"), USUAL), USUAL);
});

test("names sort as people count, and rows without a value come last", () => {
  assert.deepEqual(sorted("name"), ["t1", "t2", "t10"]);
  assert.deepEqual(sorted("-name"), ["t10", "t2", "t1"]);
  assert.deepEqual(sorted("held"), ["t10", "t1", "t2"]);
  assert.deepEqual(sorted("-held"), ["t1", "t10", "t2"]);
});

test("an unknown order keeps the rows as they are", () => {
  for (const sort of ["", "plan", "other"]) assert.deepEqual(sorted(sort), ["t10", "t2", "t1"]);
});
