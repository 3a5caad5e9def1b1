// Pools page: all pools with their size, demand and lending.

import { get } from "../api.js";
import { badge, card, el, empty, redraw, table } from "../dom.js";
import { count, figure, gpus, plural } from "../format.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";

const POOLS_MAX = 1000;
const CREATE = "ebbtide pools create training --kind training\nebbtide pools create serving --kind inference";

export const title = () => "Pools";

export async function show(root, { signal }) {
  const frame = new PageFrame(root, "Pools");
  const list = el("div");
  const refresh = async () => {
    const { items } = await get("/v1/pools", { query: { limit: POOLS_MAX }, signal });
    frame.fill(() => list);
    frame.describe(`${plural(items.length, "pool")}, ${gpus(items.reduce((sum, pool) => sum + pool.gpus, 0))}`);
    redraw(list, JSON.stringify(items), () => contents(items));
  };
  const wants = (event) => /^(Pool|Node|Loan|Demand|Shadow)/.test(event.code);
  keepUp(refresh, { signal, everyS: 10, wants, failed: frame.failed });
}

function contents(pools) {
  if (!pools.length) {
    const todo = "Create a training pool and an inference pool, then add nodes:";
    return card("No pools", empty("There are no pools yet", todo, el("pre", {}, CREATE)));
  }
  const row = (pool) => [
    el("a", { href: `#/pools/${encodeURIComponent(pool.name)}` }, pool.name),
    badge(pool.kind),
    el("a", { href: `#/nodes?pool=${encodeURIComponent(pool.name)}` }, count(pool.nodes)),
    count(pool.gpus),
    count(pool.capacity_gpus),
    pool.demand ? figure(pool.demand.gpus) : "–",
    pool.lent_nodes === undefined ? "–" : count(pool.lent_nodes),
    lendingWord(pool.lending),
  ];
  const columns = [["Pool"], ["Kind"], ["Nodes", true], ["GPUs", true], ["Up", true], ["Demand in GPUs", true],
    ["Lent nodes", true], ["Lending"]];
  const shown = table("Pools", columns, pools.map(row));
  return el("section", { class: "card", "aria-label": "Pools" }, shown);
}

function lendingWord(lending) {
  if (!lending) return "–";
  if (!lending.enabled) return "off";
  return lending.mode === "shadow" ? "shadow mode" : "on";
}
