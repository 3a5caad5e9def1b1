// Queues page: guarantees, limits and use of all queues, and the form that creates one.

import { createQueueAction } from "../queue_actions.js";
import { card, el, empty, redraw } from "../dom.js";
import { count, gpus, plural } from "../format.js";
import { addressOf, filterForm, pageButtons, readFilters, sortableTable, sortRows } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { lacksRole, whoAmI } from "../permissions.js";
import { limitText, queueBar } from "../queue_use.js";
import { get } from "../api.js";

const ROWS = 100;
const QUEUES_MAX = 1000;
const USUAL = { name: "", sort: "-used", page: "1" };
const CREATE = "ebbtide queues create research --guaranteed 16 --limit 64";
const COLUMNS = [
  { key: "name", name: "Queue", value: (queue) => queue.name },
  { key: "use", name: "Use" },
  { key: "used", name: "GPUs", isNumber: true, value: (queue) => queue.used_gpus },
  { key: "guaranteed", name: "Guaranteed", isNumber: true, value: (queue) => queue.guaranteed_gpus },
  { key: "limit", name: "Limit", isNumber: true, value: (queue) => queue.limit_gpus ?? Infinity },
  { key: "borrowed", name: "Borrowed", isNumber: true, value: (queue) => queue.borrowed_gpus },
  { key: "running", name: "Running", isNumber: true, value: (queue) => queue.running_jobs },
  { key: "pending", name: "Pending", isNumber: true, value: (queue) => queue.waiting_jobs },
];

export const title = () => "Queues";

export async function show(root, { query, signal }) {
  const page = new QueuesPage(root, query, signal);
  const wants = (event) => event.code === "QueueChanged";
  page.again = keepUp(() => page.refresh(), { signal, wants, failed: page.frame.failed });
}

class QueuesPage {
  again = async () => {}; // set once the page refreshes itself

  constructor(root, query, signal) {
    this.signal = signal;
    this.wanted = readFilters(query, USUAL);
    this.frame = new PageFrame(root, "Queues");
    this.list = el("div", { class: "stack" });
    const changed = (wanted) => this.#choose({ ...wanted, page: "1" });
    const filters = [{ name: "name", label: "Name contains" }];
    this.form = filterForm("Filter queues", filters, this.wanted, { isLive: true, changed });
  }

  async refresh() {
    const [{ items }, who] = await Promise.all([
      get("/v1/queues", { query: { limit: QUEUES_MAX }, signal: this.signal }),
      whoAmI(),
    ]);
    this.queues = items;
    this.frame.fill(() => [this.form, this.list]);
    this.frame.offer([createQueueAction(lacksRole(who, "admin"))], () => this.again());
    this.#draw();
  }

  #choose(change) {
    Object.assign(this.wanted, change);
    history.replaceState(null, "", addressOf("/queues", this.wanted, USUAL));
    if (this.queues) this.#draw();
  }

  #draw() {
    const part = this.wanted.name.toLowerCase();
    const matching = this.queues.filter((queue) => queue.name.toLowerCase().includes(part));
    const found = sortRows(matching, COLUMNS, this.wanted.sort);
    const pages = Math.max(1, Math.ceil(found.length / ROWS));
    const at = Math.min(pages, Math.max(1, Math.floor(Number(this.wanted.page)) || 1));
    const rows = found.slice((at - 1) * ROWS, at * ROWS);
    const guaranteed = found.reduce((sum, queue) => sum + queue.guaranteed_gpus, 0);
    this.frame.describe(`${plural(found.length, "queue")}, ${gpus(guaranteed)} guaranteed`);
    redraw(this.list, JSON.stringify([rows, at, pages, this.wanted.sort, this.queues.length > 0]), () => {
      if (!rows.length) return this.queues.length ? noMatch() : noQueues();
      const choose = (sort) => this.#choose({ sort, page: "1" });
      const shown = sortableTable("Queues", COLUMNS, rows.map(row), this.wanted.sort, choose);
      return [
        el("section", { class: "card", "aria-label": "Queues" }, shown),
        pageButtons("Pages of queues", at, pages, (page) => this.#choose({ page: String(page) })),
      ];
    });
  }
}

function row(queue) {
  const link = el("a", { href: `#/queues/${encodeURIComponent(queue.name)}` }, queue.name);
  const name = queue.declared ? link : [link, el("span", { class: "small muted" }, " not declared")];
  const limit = limitText(queue.limit_gpus);
  const quota = [count(queue.used_gpus), count(queue.guaranteed_gpus), limit, count(queue.borrowed_gpus)];
  return [name, queueBar(queue), ...quota, count(queue.running_jobs), count(queue.waiting_jobs)];
}

function noMatch() {
  return card("No queues", empty("No matching queues", "Change or clear the filter."));
}

function noQueues() {
  const todo = "Jobs without a queue use the queue default. Create queues to divide the GPUs:";
  return card("No queues", empty("There are no queues yet", todo, el("pre", {}, CREATE)));
}
