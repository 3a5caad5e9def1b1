// Audit page: requested changes, newest first, with filters, and the check of the log's digests.

import { get } from "../api.js";
import { toast } from "../dialogs.js";
import { card, el, empty, facts, put, redraw } from "../dom.js";
import { count, plural, words } from "../format.js";
import { CursorPages, filterForm, openWith, readFilters } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { documentText } from "../records.js";
import { when } from "../times.js";

const ROWS = 50;
const DAY_S = 86_400;
const USUAL = { actor: "", subject: "", period: "" };
const PERIODS = [["", "All"], [String(DAY_S), "Last day"], [String(7 * DAY_S), "Last 7 days"],
  [String(30 * DAY_S), "Last 30 days"]];
const FILTERS = [
  { name: "actor", label: "Caller" },
  { name: "subject", label: "Job id, node, pool or queue" },
  { name: "period", label: "Period", options: PERIODS },
];

export const title = () => "Audit log";

export async function show(root, { query, signal }) {
  const { period, ...wanted } = readFilters(query, USUAL);
  const frame = new PageFrame(root, "Audit log");
  const changed = openWith("/audit", USUAL);
  const form = filterForm("Filter the audit log", FILTERS, { ...wanted, period }, { changed });
  const list = el("div");
  const pages = new CursorPages("Pages of the audit log", () => again());
  const sinceS = period ? Math.max(0, Math.floor(Date.now() / 1000 - Number(period))) : null;
  const refresh = async () => {
    const page = { ...wanted, since_s: sinceS, order: "newest", limit: ROWS, cursor: pages.cursor };
    const { items, next } = await get("/v1/audit", { query: page, signal });
    frame.fill(() => [form, list, pages.place]);
    redraw(list, JSON.stringify(items), () => contents(items, wanted.actor || wanted.subject || period));
    pages.update(next);
  };
  frame.describe("Every requested change, and every request that was forbidden.");
  frame.offer([{ name: "Verify the log", open: ({ refused }) => verify(refused, frame, signal) }], () => {});
  const again = keepUp(refresh, { signal, wants: () => false, failed: frame.failed });
}

async function verify(place, frame, signal) {
  try {
    const report = await get("/v1/audit:verify", { signal });
    put(place, card("Verification", verdict(report)));
    toast(report.problems.length ? "The audit log has been changed." : "The audit log was verified.");
  } catch (error) {
    frame.failed(error);
  }
}

function verdict({ chained, entries, first_number: first, last_number: last, digest, problems }) {
  if (!chained && !entries) {
    return el("p", {}, "Entries have no digests. Set ", el("code", {}, "EBBTIDE_AUDIT_CHAIN=true"), " to record them.");
  }
  const where = (number) => (number ? `Entry ${number}: ` : "");
  const found = problems.map((each) => el("li", {}, `${where(each.number)}${each.problem}`));
  return [
    el("p", { class: problems.length ? "note bad" : "note" }, problems.length
      ? `${plural(problems.length, "problem")} found.` : "No entry was changed, removed, inserted or moved."),
    problems.length > 0 && el("ul", {}, found),
    facts([["Entries", `${count(entries)}, numbers ${count(first)} to ${count(last)}`],
      ["Newest digest", digest && el("code", {}, digest)]]),
  ];
}

function contents(entries, isFiltered) {
  if (!entries.length) {
    const all = el("a", { href: "#/audit", class: "button" }, "All entries");
    const none = isFiltered ? empty("No matching entries", "Change or clear the filters.", all)
      : empty("No entries yet", "Changes that users request appear here.");
    return card("No entries", none);
  }
  const shown = el("ol", { class: "record" }, entries.map(entry));
  return el("section", { class: "card", "aria-label": "Audit log" }, shown);
}

function entry(each) {
  const isForbidden = each.outcome === "forbidden";
  const what = [el("strong", {}, isForbidden ? each.action : words(each.action)), " ", each.subject];
  const by = el("span", { class: "muted" }, ` by ${each.actor}`);
  return el("li", {}, when(each.at_s), el("div", {},
    el("p", {}, what, by, isForbidden && el("span", { class: "denied" }, " forbidden")),
    el("details", {}, el("summary", {}, `Entry ${count(each.number)}`), facts([
      ["Caller", `${each.actor}${each.actor_id ? ` (${each.actor_id})` : ""}`],
      ["Token", each.token_id],
      ["Request", each.request_id],
    ]), each.before && [el("h3", {}, "Before"), documentText(`Entry ${each.number} before`, each.before)],
    each.after && [el("h3", {}, "After"), documentText(`Entry ${each.number} after`, each.after)])));
}
