// Texts of the demo's controls.

import assert from "node:assert/strict";
import { test } from "node:test";

import { dayTime, passedShare, surgeLeftS, surgeSentence } from "../../../api/console/static/demo_words.js";

const day = (more = {}) => ({
  now_s: 1090, started_at_s: 1000, day_s: 180, surged_at_s: null, surge_until_s: null, surge_gpus: {}, ...more,
});
const receipt = (asked, returned, outcome = "in_time") => ({
  asked_at_s: asked, return_by_s: asked + 15, returned_at_s: returned, outcome,
});

test("the day's time follows the service's clock", () => {
  assert.equal(dayTime(day()), "12:00");
  assert.equal(dayTime(day({ now_s: 1000 })), "00:00");
  assert.equal(dayTime(day({ now_s: 2000 })), "24:00");
  assert.equal(passedShare(day({ started_at_s: null })), 0);
});

test("a surge counts the nodes that it recalled", () => {
  const surging = day({ surged_at_s: 1080, surge_until_s: 1100 });
  assert.equal(surgeSentence(day(), []), "");
  assert.equal(surgeLeftS(surging), 10);
  assert.match(surgeSentence(surging, []), /No node/);
  const receipts = [receipt(1081, 1084), receipt(1081, 1092.5), receipt(1082, null, null), receipt(1120, 1121)];
  assert.equal(
    surgeSentence(surging, receipts),
    "3 nodes recalled, 2 returned, the closest 3.5 s before its deadline, 0 late.",
  );
  assert.match(surgeSentence(surging, [receipt(1081, 1099, "late")]), /1 late/);
});
