// Filters of nodes.

import assert from "node:assert/strict";
import { test } from "node:test";

import { filterNodes } from "../../../api/console/static/fleet_nodes.js";

const NODES = [
  { name: "Rack1-a", pool: "training", state: "training", gpu: "a100-80g" },
  { name: "rack1-b", pool: "serving", state: "lent", gpu: "h100-80g" },
  { name: "rack2-a", pool: "serving", state: "down", gpu: "h100-80g" },
];
const found = (wanted) => filterNodes(NODES, wanted).map((node) => node.name);

test("a name matches anywhere and in any case", () => {
  assert.deepEqual(found({ name: "RACK1" }), ["Rack1-a", "rack1-b"]);
  assert.deepEqual(found({ name: "-a" }), ["Rack1-a", "rack2-a"]);
});

test("all filters apply together, and empty ones match everything", () => {
  assert.deepEqual(found({}), NODES.map((node) => node.name));
  assert.deepEqual(found({ pool: "serving", gpu: "h100-80g", state: "" }), ["rack1-b", "rack2-a"]);
  assert.deepEqual(found({ pool: "serving", state: "down", name: "rack2" }), ["rack2-a"]);
  assert.deepEqual(found({ pool: "training", state: "down" }), []);
});
