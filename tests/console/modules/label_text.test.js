// Labels of jobs as text in forms, filters and files.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as labels from "../../../api/console/static/label_text.js";

const { atLabelsField, labelChanges, labelsText, parseLabels, withRequirement } = labels;

test("labels are read from commas and lines, and written in order", () => {
  assert.deepEqual(parseLabels(" team = vision,\n\ntier=\n a/b=c=d "), { team: "vision", tier: "", "a/b": "c=d" });
  assert.equal(labelsText({ team: "vision", stage: "a" }), "stage=a, team=vision");
  assert.deepEqual(parseLabels(labelsText({ b: "", a: "x" }, "\n")), { a: "x", b: "" });
  assert.deepEqual(parseLabels(""), {});
});

test("text without a key and a value is refused", () => {
  for (const text of ["team", "=vision", "a=b,team", "a=b,a=c"]) assert.throws(() => parseLabels(text), SyntaxError);
});

test("only labels that differ are sent, and removed ones as null", () => {
  assert.deepEqual(labelChanges({ a: "1", b: "2", c: "3" }, { a: "1", b: "4", d: "" }), { b: "4", c: null, d: "" });
  assert.deepEqual(labelChanges({ a: "1" }, { a: "1" }), {});
});

test("a chip adds its label to a selector once", () => {
  assert.equal(withRequirement("", "team", "vision"), "team=vision");
  assert.equal(withRequirement("stage in (a,b)", "team", "vision"), "stage in (a,b),team=vision");
  assert.equal(withRequirement("a, team=vision", "team", "vision"), "a, team=vision");
});

test("errors about one label are shown at the field of all labels", () => {
  const errors = [{ field: "labels.team", value: "-", allowed: "x" }, { field: "gpus.min", value: 0, allowed: "y" }];
  assert.deepEqual(atLabelsField(errors).map((each) => each.field), ["labels", "gpus.min"]);
  assert.deepEqual(atLabelsField(undefined), []);
});
