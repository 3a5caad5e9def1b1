// Jobs page: live, recently failed and ended jobs, with filters, order, saved views and actions on several jobs.

import { get } from "../api.js";
import { csvOf, csvTime, download } from "../csv_text.js";
import { problemNote, toast } from "../dialogs.js";
import { card, el, empty, put } from "../dom.js";
import { plural } from "../format.js";
import { addressOf, isFiltered, requestOf, wantedOf } from "../job_query.js";
import { labelsText } from "../label_text.js";
import { keepUp } from "../live.js";
import { deleteView, loadViews, saveView } from "../saved_views.js";
import { bulkBar } from "./jobs_bulk.js";
import { focusPressed, jobTable } from "./jobs_table.js";

const PAGE_JOBS = 100;
const EXPORT_PAGE_JOBS = 1000;
const EXPORT_JOBS_MAX = 20_000;
const STATES = [
  ["recent", "Live, or failed in 24 h"],
  ["live", "Live"],
  ["", "All"],
  ["running,starting,resizing", "Running"],
  ["queued,planning,submitted,preempted", "Pending"],
  ["suspended", "Suspended"],
  ["succeeded", "Succeeded"],
  ["failed", "Failed"],
  ["cancelled", "Cancelled"],
];
const HOUR_S = 3600;

export const title = () => "Jobs";

export async function show(root, { query, signal }) {
  const page = new JobsPage(wantedOf(query), signal);
  page.draw(root);
  const failed = (error) => error && put(page.body, problemNote(error));
  const wants = (event) => event.code.startsWith("Job");
  page.again = keepUp(() => page.refresh(), { signal, everyS: 10, wants, failed });
}

class JobsPage {
  again = async () => {}; // set once the page refreshes itself
  cursors = [""];
  at = 0;
  drawnAt = -1; // page that is shown
  next = null;
  /** @type {Map<string, any>} */
  selected = new Map();

  constructor(wanted, signal) {
    this.wanted = wanted;
    this.signal = signal;
    this.body = el("div", { class: "stack" });
    this.bulk = el("div", {});
    this.result = el("div", {});
    this.pager = el("nav", { class: "row", "aria-label": "Pages of jobs" });
  }

  draw(root) {
    const submit = el("a", { class: "button first", href: "#/submit" }, "Submit a job");
    const click = (event) => this.#export(event.currentTarget);
    const csv = el("button", { type: "button", on: { click } }, "Download CSV");
    const head = el("div", { class: "head" }, el("h1", { class: "grow" }, "Jobs"), csv, submit);
    const tools = [filters(this.wanted), new ViewMenu(this.wanted).place];
    put(root, head, el("div", { class: "stack" }, tools, this.bulk, this.result, this.body, this.pager));
  }

  /** Draws the list at once, and again with the reasons of pending jobs, which take a dry run of the scheduler. */
  async refresh() {
    if (this.drawnAt !== this.at) await this.#load(false);
    await this.#load(true);
  }

  async #load(reasons) {
    const { at } = this;
    const query = { ...requestOf(this.wanted), reasons, limit: PAGE_JOBS, cursor: this.cursors[at] };
    const { items, next } = await get("/v1/jobs", { query, signal: this.signal });
    if (at !== this.at) return;
    this.next = next;
    this.drawnAt = at;
    const changed = () => this.#drawBulk();
    const drawn = items.length
      ? jobTable(items, { wanted: this.wanted, selected: this.selected, changed })
      : isFiltered(this.wanted) ? noneAsked() : noneAtAll();
    const shown = items.length ? el("section", { class: "card", "aria-label": "Jobs" }, drawn) : card("No jobs", drawn);
    put(this.body, shown);
    focusPressed(this.body);
    this.#drawBulk();
    this.#drawPager();
  }

  #drawBulk() {
    const clear = () => {
      this.selected.clear();
      this.again();
    };
    const acted = () => {
      this.selected.clear();
      this.again();
    };
    put(this.bulk, this.selected.size ? bulkBar(this.selected, { result: this.result, acted, clear }) : null);
  }

  #drawPager() {
    const turn = (to) => () => {
      if (to > this.at) this.cursors[to] = this.next;
      this.at = to;
      scrollTo({ top: 0 });
      this.again();
    };
    const button = (name, to, disabled) => el("button", { type: "button", disabled, on: { click: turn(to) } }, name);
    const [before, after] = this.wanted.sort === "-submitted" ? ["Newer", "Older"] : ["Previous", "Next"];
    put(this.pager, this.at || this.next ? [
      button(before, this.at - 1, this.at === 0),
      el("span", { class: "muted small" }, `Page ${this.at + 1}`),
      button(after, this.at + 1, !this.next),
    ] : null);
  }

  /** Downloads all jobs that match, not only those of this page. */
  async #export(button) {
    button.disabled = true;
    try {
      const jobs = [];
      let cursor = "";
      do {
        const query = { ...requestOf(this.wanted), reasons: true, limit: EXPORT_PAGE_JOBS, cursor };
        const page = await get("/v1/jobs", { query, signal: this.signal });
        jobs.push(...page.items);
        cursor = page.next;
        button.textContent = `${plural(jobs.length, "job")} …`;
      } while (cursor && jobs.length < EXPORT_JOBS_MAX);
      download("jobs.csv", csvOf([EXPORTED.map(([name]) => name), ...jobs.map(exported)]));
      if (cursor) toast(`The file has the first ${plural(jobs.length, "job")}. Set filters for the others.`);
    } catch (error) {
      put(this.result, problemNote(error));
    }
    button.textContent = "Download CSV";
    button.disabled = false;
  }
}

/** @type {[string, (job: any) => any][]} */
const EXPORTED = [
  ["id", (job) => job.id],
  ["name", (job) => job.name],
  ["state", (job) => job.state],
  ["reason", (job) => job.pending_reason?.detail ?? job.message],
  ["queue", (job) => job.queue],
  ["owner", (job) => job.owner],
  ["labels", (job) => labelsText(job.labels)],
  ["priority", (job) => job.priority],
  ["gpus", (job) => job.gpus.target],
  ["gpus_min", (job) => job.gpus.min],
  ["gpus_max", (job) => job.gpus.max],
  ["steps", (job) => job.progress.steps],
  ["steps_total", (job) => job.progress.steps_total],
  ["loss", (job) => job.progress.loss],
  ["gpu_hours", (job) => job.account.gpu_s / HOUR_S],
  ["lost_gpu_hours", (job) => job.account.lost_gpu_s / HOUR_S],
  ["pending_s", (job) => job.account.waited_s],
  ["plan", (job) => job.plan],
  ["submitted", (job) => csvTime(job.submitted_at_s)],
  ["first_started", (job) => csvTime(job.account.first_started_at_s)],
  ["state_since", (job) => csvTime(job.state_since_s)],
];

function exported(job) {
  return EXPORTED.map(([, of]) => of(job));
}

/** A filter changes the address, so that it can be bookmarked and shared. */
function filters(wanted) {
  const states = STATES.some(([value]) => value === wanted.state) ? STATES : [...STATES, [wanted.state, wanted.state]];
  const options = states.map(([value, name]) => el("option", { value, selected: value === wanted.state }, name));
  const select = el("select", { id: "state", name: "state" }, options);
  const text = (name, label, placeholder) => {
    const input = el("input", { id: name, name, value: wanted[name], placeholder, autocomplete: "off" });
    return el("div", {}, el("label", { for: name }, label), input);
  };
  const apply = (event) => {
    event.preventDefault();
    const given = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, String(value).trim()]));
    location.hash = addressOf({ ...wanted, ...given });
  };
  const form = el(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter jobs", on: { submit: apply } },
    text("search", "Search", "part of a name, ID, queue or owner"),
    el("div", {}, el("label", { for: "state" }, "State"), select),
    text("queue", "Queue", "any"),
    text("owner", "Owner", "any"),
    text("selector", "Labels", "team=vision, tier!=dev"),
    el("button", { type: "submit" }, "Filter"),
  );
  select.addEventListener("change", apply);
  return form;
}

/** Saved views: links to addresses of this page, named in this browser. */
class ViewMenu {
  constructor(wanted) {
    this.query = addressOf(wanted).split("?")[1] ?? "";
    this.place = el("div", { class: "views" });
    this.#draw(loadViews("jobs", localStorage));
  }

  #draw(views) {
    const current = views.find((view) => view.query === this.query);
    const links = views.map((view) => el("li", {},
      el("a", { href: `#/jobs?${view.query}`, "aria-current": view === current ? "true" : null }, view.name)));
    const remove = () => this.#draw(deleteView("jobs", current.name, localStorage));
    const save = (event) => {
      event.preventDefault();
      const name = new FormData(event.currentTarget).get("view").toString().trim();
      if (name) this.#draw(saveView("jobs", { name, query: this.query }, localStorage));
    };
    const input = el("input", { id: "view", name: "view", maxlength: 40, placeholder: "Name of this view" });
    const label = el("label", { for: "view", class: "unseen" }, "Name of this view");
    const form = el("form", { class: "row", on: { submit: save } }, label, input, el("button", {}, "Save view"));
    const removal = current && `Delete view ${current.name}`;
    const gone = current && el("button", { type: "button", class: "quiet", on: { click: remove } }, removal);
    put(this.place, links.length ? el("ul", { "aria-label": "Saved views" }, links) : null, current ? gone : form);
  }
}

function noneAsked() {
  const all = el("a", { href: "#/jobs?state=", class: "button" }, "All jobs");
  return empty("No matching jobs", "Choose another state or clear the filters.", all);
}

function noneAtAll() {
  const command = "ebbtide submit --name hello --min 1 --max 2 --steps 1000 --command \"python train.py\"";
  const ended = el("a", { href: "#/jobs?state=" }, "Show ended jobs");
  return empty("No live jobs", "Submit a job here or from a shell:", el("pre", {}, command), ended);
}
