// What-if form: replays recorded jobs and demand under other policy sets, numbers of nodes, or lending limits.

import { get, post } from "../api.js";
import { card, el } from "../dom.js";
import { clearRefusals, field, showRefusals, values } from "../forms.js";
import { may, whoAmI } from "../permissions.js";

const LENDING = [["", "As now"], ["true", "All pools lend"], ["false", "No lending"]];
const POLICIES = "Comma-separated, for example ebbtide, fifo, srtf.";
const SCOPE = "what-if"; // the page has another form
const LIMITS = ["headroom", "kept_nodes_min", "lent_nodes_max", "return_deadline_s"];
const INTRO = "Simulates the jobs and the inference demand of the last days on today's fleet, with your changes. "
  + "Nothing on the cluster changes.";

/** Returns the form, or null for callers without the role admin. */
export async function whatIfForm(refused, signal) {
  if (!may(await whoAmI(), "admin")) return null;
  const { items: pools } = await get("/v1/pools", { query: { limit: 100 }, signal });
  const form = el("form", { novalidate: true }, fields(pools));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearRefusals(form, refused);
    try {
      await start(form, signal);
    } catch (error) {
      showRefusals(form, refused, error);
    }
  });
  return form;
}

function fields(pools) {
  const whole = { kind: "number", min: 0 };
  const nodes = pools.map((pool) => field(`nodes.${pool.name}`, `More nodes in ${pool.name}`, {
    kind: "number", hint: `${pool.kind} pool. A negative number removes nodes.`,
  }));
  return card("What-if replay", el("p", { class: "muted small" }, INTRO),
    el("div", { class: "form" },
      field("days", "Days to replay", { kind: "number", min: 0, max: 31, value: 7, hint: "Up to now, at most 31." }),
      field("policies", "Policy sets to replay", { scope: SCOPE, value: "ebbtide", hint: POLICIES }),
      nodes,
      field("lending.enabled", "Lending", { options: LENDING }),
      field("lending.headroom", "Headroom", { ...whole, max: 1, hint: "Fraction of each pool. Default: as now." }),
      field("lending.kept_nodes_min", "Nodes never lent", { ...whole, hint: "Per pool. Default: as now." }),
      field("lending.lent_nodes_max", "Most nodes on loan", { ...whole, hint: "Per pool. Default: as now." }),
      field("lending.return_deadline_s", "Return deadline (s)", { ...whole, hint: "Default: as now." })),
    el("label", { class: "row small" }, el("input", { type: "checkbox", name: "baseline", checked: true }),
      "Also replay without the changes, and compare"),
    el("div", { class: "row" }, el("button", { class: "first", type: "submit" }, "Replay")));
}

/** Starts the replay, and one without changes if there are any, and opens the report of both. */
async function start(form, signal) {
  const { baseline, policies = "ebbtide", days, ...given } = values(form);
  const common = { days, policies: policies.split(",").map((name) => name.trim()).filter(Boolean) };
  const nodes = Object.fromEntries(Object.entries(given)
    .filter(([name, value]) => name.startsWith("nodes.") && value)
    .map(([name, value]) => [name.slice("nodes.".length), value]));
  const lending = Object.fromEntries(LIMITS.map((name) => [name, given[`lending.${name}`]])
    .filter(([, value]) => value !== undefined));
  if (given["lending.enabled"]) lending.enabled = given["lending.enabled"] === "true";
  const made = await post("/v1/simulations:replay", { ...common, nodes, lending }, { signal });
  const isChanged = Object.keys(nodes).length + Object.keys(lending).length > 0;
  const other = baseline && isChanged ? await post("/v1/simulations:replay", common, { signal }) : null;
  location.hash = `#/simulate/${made.id}${other ? `?with=${other.id}` : ""}`;
}
