// Use of queues.

import assert from "node:assert/strict";
import { test } from "node:test";

import { limitText, unusedGuarantee } from "../../../api/console/static/queue_use.js";

test("the unused part of a guarantee can be borrowed", () => {
  assert.equal(unusedGuarantee({ guaranteed_gpus: 24, own_gpus: 16 }), 8);
  assert.equal(unusedGuarantee({ guaranteed_gpus: 8, own_gpus: 8 }), 0);
});

test("a missing limit is no limit, and zero is a limit", () => {
  assert.deepEqual([null, 0, 12_000].map(limitText), ["none", "0", "12,000"]);
});
