// Log of one rank: its last lines and new ones, over all runs or one run, with search and download.

import { get, Problem } from "../api.js";
import { download } from "../csv_text.js";
import { problemNote } from "../dialogs.js";
import { card, copyButton, el, put, say } from "../dom.js";
import { count, plural } from "../format.js";
import { lineMatcher, logText, markedParts } from "../log_search.js";
import { follow } from "../stream.js";

const TAIL_LINES = 200;
const LINES_SHOWN_MAX = 1000;
const PAGE_LINES = 1000;
const LINES_READ_MAX = 200_000; // of a search or a download
const ENDED = ["succeeded", "failed", "cancelled"];
const END_PX = 30;

export class JobLog {
  /** @type {AbortController} */
  current = new AbortController();
  generation = null; // of the last line shown
  found = 0;

  constructor(job, path, signal) {
    this.isLive = !ENDED.includes(job.state);
    this.path = path;
    // Not a live region: training prints for days, which would flood screen readers.
    this.log = el("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log lines" });
    this.place = el("div", { class: "stack" });
    this.status = el("p", { class: "small muted", role: "status" });
    const most = Math.max(0, job.gpus.max - 1);
    this.rank = el("input", { id: "rank", type: "number", min: 0, max: most, step: 1, value: 0 });
    this.run = el("select", { id: "run" }, el("option", { value: "" }, "All"));
    this.text = el("input", { id: "log-search", type: "search", placeholder: "Find in all lines" });
    this.follows = el("input", { id: "log-follow", type: "checkbox", checked: true });
    this.card = this.#card();
    signal.addEventListener("abort", () => this.current.abort());
    this.open();
  }

  /** Shows the log of one run, and moves the page to it. */
  openRun(generation) {
    if (![...this.run.options].some((each) => each.value === String(generation))) this.#addRun(generation);
    this.run.value = String(generation);
    this.text.value = "";
    this.open();
    this.card.scrollIntoView({ block: "start" });
    this.log.focus({ preventScroll: true });
  }

  #card() {
    const label = (id, name, input) => el("label", { class: "row small", for: id }, name, input);
    const search = el("form", { class: "row grow", role: "search", "aria-label": "Search the log" },
      el("label", { for: "log-search", class: "unseen" }, "Search the log"), this.text, el("button", {}, "Search"));
    search.addEventListener("submit", (event) => {
      event.preventDefault();
      this.open();
    });
    this.text.addEventListener("input", () => !this.text.value && this.open());
    for (const input of [this.rank, this.run]) input.addEventListener("change", () => this.open());
    const save = el("button", { type: "button", on: { click: () => this.#download(save) } }, "Download");
    const choices = [label("run", "Run", this.run), label("rank", "Rank", this.rank)];
    const follows = label("log-follow", "Follow", this.follows);
    const tools = el("div", { class: "row log-tools" }, choices, follows, search, save);
    return card(["Log", copyButton("the log", () => this.log.textContent)], tools, this.place);
  }

  get #query() {
    return { rank: this.rank.value || "0", generation: this.run.value };
  }

  async open() {
    this.current.abort();
    const mine = new AbortController();
    this.current = mine;
    put(this.log);
    this.generation = null;
    this.found = 0;
    try {
      const matches = lineMatcher(this.text.value);
      const resume = matches ? await this.#search(matches, mine.signal) : await this.#tail(mine.signal);
      const given = new URLSearchParams({ rank: this.#query.rank, cursor: resume });
      if (this.#query.generation) given.set("generation", this.#query.generation);
      const heard = (event) => event.type === "message" && this.#hear(event.data, matches);
      await follow(`${this.path}/logs?${given}`, { heard, signal: mine.signal });
    } catch (error) {
      const isMissing = error instanceof Problem && error.status === 404;
      const shown = isMissing ? el("p", { class: "muted" }, error.message) : problemNote(error);
      if (!mine.signal.aborted) put(this.place, shown);
    }
  }

  /** Shows the last lines. Returns the cursor of the next one. */
  async #tail(signal) {
    const page = await get(`${this.path}/logs`, { query: { ...this.#query, tail: TAIL_LINES }, signal });
    put(this.place, this.log, this.status);
    this.#listRuns(page.generations);
    for (const line of page.items) this.#add(line);
    this.log.scrollTop = this.log.scrollHeight;
    const runs = page.generations.length > 1 && !this.run.value ? `, run ${page.generations.at(-1)}` : "";
    const lines = page.items.length ? `Last lines of rank ${this.#query.rank}${runs}` : "No lines yet";
    say(this.status, this.isLive ? `${lines}; new lines are added, also after a resize.` : `${lines}.`);
    return page.resume;
  }

  /** Shows the lines of all chosen runs that match. Returns the cursor of the next line. */
  async #search(matches, signal) {
    put(this.place, this.log, this.status);
    let resume = "";
    for await (const { items, read, cursor } of this.#pages(signal)) {
      for (const line of items.filter(matches)) this.#hear(line, null);
      resume = cursor;
      const limit = read >= LINES_READ_MAX ? " (the first ones; choose a run to search further)" : "";
      say(this.status, `${plural(this.found, "line")} found in ${count(read)}${limit}.`);
    }
    return resume;
  }

  /** Reads the lines of the chosen runs from the first one. */
  async *#pages(signal) {
    const first = await get(`${this.path}/logs`, { query: { ...this.#query, tail: 0 }, signal });
    this.#listRuns(first.generations);
    let cursor = `${first.generations[0] ?? 0}:0`;
    for (let read = 0, more = true; more && read < LINES_READ_MAX; ) {
      const page = await get(`${this.path}/logs`, { query: { ...this.#query, cursor, limit: PAGE_LINES }, signal });
      read += page.items.length;
      cursor = page.next ?? page.resume;
      more = page.next !== null;
      yield { items: page.items, read, cursor };
    }
  }

  async #download(button) {
    button.disabled = true;
    try {
      const lines = [];
      for await (const { items } of this.#pages(this.current.signal)) lines.push(...items);
      const run = this.run.value ? `-run-${this.run.value}` : "";
      const job = decodeURIComponent(this.path.split("/").at(-1));
      download(`${job}${run}-rank-${this.#query.rank}.log`, logText(lines), "text/plain");
    } catch (error) {
      put(this.place, problemNote(error));
    }
    button.disabled = false;
  }

  #hear(line, matches) {
    if (matches && !matches(line)) return;
    this.found += 1;
    if (!this.text.value && ![...this.run.options].some((each) => each.value === String(line.generation))) {
      this.#addRun(line.generation);
    }
    this.#add(line);
  }

  /** Adds a line, and a heading where another run begins. */
  #add(line) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < END_PX;
    if (line.generation !== this.generation && (this.generation !== null || !this.run.value)) {
      this.log.append(el("span", { class: "run-mark" }, `run ${line.generation}`));
    }
    this.generation = line.generation;
    const parts = markedParts(line.text, this.text.value);
    this.log.append(el("span", {}, parts.map(([text, isMatch]) => (isMatch ? el("mark", {}, text) : text)), "\n"));
    while (this.log.childNodes.length > LINES_SHOWN_MAX) this.log.firstChild.remove();
    if (isAtEnd && this.follows.checked) this.log.scrollTop = this.log.scrollHeight;
  }

  #listRuns(generations) {
    if (this.run.value) return; // the answer names the chosen run only
    const known = new Set([...this.run.options].map((each) => each.value));
    for (const each of generations) if (!known.has(String(each))) this.#addRun(each);
  }

  #addRun(generation) {
    this.run.append(el("option", { value: generation }, String(generation)));
  }
}
