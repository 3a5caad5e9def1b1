// Decisions page: what each tick decided and why, newest first, with filters.

import { get } from "../api.js";
import { card, el, empty, redraw } from "../dom.js";
import { arrows, words } from "../format.js";
import { addressOf, CursorPages, filterForm, openWith, readFilters } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { documentText } from "../records.js";
import { when } from "../times.js";

const ROWS = 50;
const USUAL = { kind: "", subject: "" };
const KINDS = ["StartJob", "ResizeJob", "PreemptJob", "SuspendRun", "StopJob", "RejectJob", "ProposeLoan", "LendNode",
  "RecallNode", "CancelRecall", "ReturnNode"];
const FILTERS = [
  { name: "kind", label: "Kind", options: [["", "All"], ...KINDS.map((kind) => [kind, words(kind)])] },
  { name: "subject", label: "Job id or node" },
];

export const title = () => "Decisions";

export async function show(root, { query, signal }) {
  const wanted = readFilters(query, USUAL);
  const frame = new PageFrame(root, "Decisions");
  const form = filterForm("Filter decisions", FILTERS, wanted, { changed: openWith("/decisions", USUAL) });
  const list = el("div");
  const pages = new CursorPages("Pages of decisions", () => again());
  const refresh = async () => {
    const page = { ...wanted, order: "newest", limit: ROWS, cursor: pages.cursor };
    const { items, next } = await get("/v1/decisions", { query: page, signal });
    frame.fill(() => [form, list, pages.place]);
    redraw(list, JSON.stringify([items, next]), () => contents(items, next, wanted));
    pages.update(next);
  };
  frame.describe("Each tick of the scheduler records its decisions with their reasons.");
  const again = keepUp(refresh, { signal, wants: () => false, failed: frame.failed });
}

function contents(decisions, next, wanted) {
  if (decisions.length) {
    const shown = el("ol", { class: "record" }, decisions.map(entry));
    return el("section", { class: "card", "aria-label": "Decisions" }, shown);
  }
  if (next) {
    return card("No decisions", empty("None among the decisions searched", "Press Older to search earlier ones."));
  }
  const isFiltered = addressOf("/decisions", wanted, USUAL) !== "#/decisions";
  const all = el("a", { href: "#/decisions", class: "button" }, "All decisions");
  const submit = el("a", { href: "#/submit", class: "button" }, "Submit a job");
  const none = isFiltered ? empty("No matching decisions", "Change or clear the filters.", all)
    : empty("No decisions yet", "Submit a job to see it placed.", submit);
  return card("No decisions", none);
}

function entry({ at_s, kind, subject, generation, number, decision }) {
  const { reason } = decision;
  const isNode = "node" in decision;
  const href = isNode ? `#/nodes/${encodeURIComponent(subject)}` : `#/jobs/${subject}`;
  const about = isNode || subject.includes("-") ? el("a", { href }, subject) : subject;
  const detail = el("details", {}, el("summary", {}, `Decision ${number}, state ${generation}`),
    documentText(`Decision ${number}`, decision));
  return el("li", {}, when(at_s), el("div", {},
    el("p", {}, el("strong", {}, words(kind)), " ", about),
    el("p", {}, el("span", { class: "muted" }, `${words(reason.code)}: `), arrows(reason.detail)),
    detail));
}
