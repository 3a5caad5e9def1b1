// GPUs of loans and nodes as text.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as module from "../../../api/console/static/loan_gpus.js";

const { formatIndices, loanGpus, parseIndices, restUses } = module;

test("indices are read as they are written", () => {
  for (const indices of [[], [0], [4, 5, 6, 7], [0, 2, 3, 9]]) {
    assert.deepEqual(parseIndices(formatIndices(indices)), indices);
  }
  assert.equal(formatIndices([0, 1, 2, 5]), "0–2, 5");
});

test("indices in any order are accepted, and other texts are not", () => {
  assert.deepEqual(parseIndices(" 6-7, 0 ,6"), [0, 6, 7]);
  for (const text of ["7-4", "a", "1,", "-1", "1.5", "12345"]) assert.equal(parseIndices(text), null, text);
});

test("a part of a node names the GPUs of the node", () => {
  assert.equal(loanGpus({ gpus: 4, node_gpus: 8, indices: [4, 5, 6, 7] }), "4 of 8 GPUs");
  assert.equal(loanGpus({ gpus: 8, node_gpus: 8, indices: [] }), "8 GPUs");
  assert.equal(loanGpus({ gpus: 4, node_gpus: null, indices: [0, 1, 2, 3] }), "4 GPUs");
  assert.equal(loanGpus({ gpus: 0, node_gpus: 8, indices: [] }), "–");
});

test("GPUs of a partial loan are told from those of inference", () => {
  const loan = { state: "active", indices: [2, 3] };
  const node = { gpus: 4, inference_gpus: 2, other_gpus: 0, loan };
  assert.deepEqual([...restUses(node, new Set([2]))], [[0, "inference"], [1, "inference"], [3, "lent"]]);
  const idle = { ...node, inference_gpus: 1 };
  assert.deepEqual([...restUses(idle, new Set([2])).values()], ["unknown", "unknown", "lent"]);
  const offered = { ...node, inference_gpus: 0, loan: { ...loan, state: "offered" } };
  assert.deepEqual([...restUses(offered, new Set()).values()], ["free", "free", "free", "free"]);
});
