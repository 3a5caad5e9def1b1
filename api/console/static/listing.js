// Lists: filters and sort order in the address, sortable tables, and pages of long lists.

import { el, put, table } from "./dom.js";

/**
 * Returns the address of a page with its filters: "#/nodes?pool=training". Empty values and `usual` ones are left out.
 * @param {string} path
 * @param {Record<string, string | number>} wanted
 * @param {Record<string, string | number>} [usual]
 */
export function addressOf(path, wanted, usual = {}) {
  const given = Object.entries(wanted).filter(([name, value]) => String(value) !== String(usual[name] ?? ""));
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `#${path}?${text}` : `#${path}`;
}

/**
 * Returns the filters of an address, with the usual values of those that are missing.
 * @template {Record<string, string>} Wanted
 * @param {URLSearchParams} query
 * @param {Wanted} usual
 * @returns {Wanted}
 */
export function readFilters(query, usual) {
  const found = Object.keys(usual).map((name) => [name, query.get(name) ?? usual[name]]);
  return /** @type {Wanted} */ (Object.fromEntries(found));
}

/**
 * A filter: a menu if it has `options`, as [value, text], else a text field.
 * @typedef {{name: string, label: string, placeholder?: string, options?: string[][]}} Filter
 */

/**
 * Filters that call `changed` with all values after each change. Text fields do so while the user types if `isLive`,
 * else on Enter.
 * @param {string} label
 * @param {Filter[]} filters
 * @param {Record<string, string>} wanted
 * @param {{isLive?: boolean, changed: (wanted: Record<string, string>) => void}} how
 */
export function filterForm(label, filters, wanted, { isLive = false, changed }) {
  /** @param {Filter} filter */
  const menu = ({ name, options }) => {
    const isKnown = options.some(([value]) => value === wanted[name]);
    const all = isKnown ? options : [...options, [wanted[name], wanted[name]]];
    return el("select", { id: `filter-${name}`, name }, all.map(([value, text]) =>
      el("option", { value, selected: value === wanted[name] }, text)));
  };
  /** @param {Filter} filter */
  const line = ({ name, placeholder = "any" }) =>
    el("input", { id: `filter-${name}`, name, type: "search", value: wanted[name], placeholder, autocomplete: "off" });
  const apply = (event) => {
    event.preventDefault();
    const given = [...new FormData(form)].map(([name, value]) => [name, String(value).trim()]);
    changed(Object.fromEntries(given));
  };
  const fields = filters.map((filter) =>
    el("div", {}, el("label", { for: `filter-${filter.name}` }, filter.label), (filter.options ? menu : line)(filter)));
  const form = el("form", { class: "filters", role: "search", "aria-label": label, on: { submit: apply } }, fields,
    !isLive && filters.some((each) => !each.options) && el("button", { type: "submit" }, "Filter"));
  form.addEventListener(isLive ? "input" : "change", (event) => {
    if (isLive || event.target instanceof HTMLSelectElement) apply(event);
  });
  return form;
}

/** Opens the address of a list with other filters. */
export function openWith(path, usual) {
  return (wanted) => {
    location.hash = addressOf(path, wanted, usual);
  };
}

/**
 * A column of a sortable table. `value` returns a row's number or text, null where there is none; those come last.
 * @typedef {{key: string, name: string, isNumber?: boolean, value?: (row: any) => string | number | null}} SortColumn
 */

const byText = new Intl.Collator("en", { numeric: true });

/**
 * Returns the rows in the order of `sort`, a column's key with "-" in front if it descends.
 * @template Row
 * @param {Row[]} rows
 * @param {SortColumn[]} columns
 * @param {string} sort
 * @returns {Row[]}
 */
export function sortRows(rows, columns, sort) {
  const column = columns.find((each) => each.key === sort.replace(/^-/, "") && each.value);
  if (!column) return [...rows];
  const direction = sort.startsWith("-") ? -1 : 1;
  const compare = (a, b) => {
    const [left, right] = [column.value(a), column.value(b)];
    if (left === null || right === null) return (left === null ? 1 : 0) - (right === null ? 1 : 0);
    const isText = typeof left === "string" || typeof right === "string";
    return direction * (isText ? byText.compare(String(left), String(right)) : left - right);
  };
  return [...rows].sort(compare);
}

/**
 * A table whose headings sort it. `choose` gets the new `sort`.
 * @param {string} caption
 * @param {SortColumn[]} columns
 * @param {any[][]} rows cells, in the order of the columns
 * @param {string} sort
 * @param {(sort: string) => void} choose
 */
export function sortableTable(caption, columns, rows, sort, choose) {
  /** @param {SortColumn} column */
  const heading = ({ key, name, value, isNumber }) => {
    if (!value) return name;
    const next = sort === key ? `-${key}` : sort === `-${key}` ? key : isNumber ? `-${key}` : key;
    return el("button", { type: "button", class: "sort", on: { click: () => choose(next) } }, name);
  };
  const whole = table(caption, columns.map((each) => [heading(each), each.isNumber]), rows);
  const heads = [...whole.querySelectorAll("thead th")];
  const at = columns.findIndex(({ key }) => key === sort.replace(/^-/, ""));
  heads[at]?.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
  return whole;
}

/** Buttons for the pages of a list in memory. Returns null if there is one page. */
export function pageButtons(label, at, pages, turn) {
  if (pages <= 1) return null;
  const button = (text, to) =>
    el("button", { type: "button", disabled: to < 1 || to > pages, on: { click: () => turn(to) } }, text);
  const now = el("span", { class: "muted small" }, `Page ${at} of ${pages}`);
  return el("nav", { class: "row", "aria-label": label }, button("Previous", at - 1), now, button("Next", at + 1));
}

/** The pages of a list that the API pages with cursors, newest first. */
export class CursorPages {
  /**
   * @param {string} label
   * @param {() => unknown} again reads the page that `cursor` starts
   */
  constructor(label, again) {
    this.cursors = [""];
    this.at = 0;
    this.again = again;
    this.place = el("nav", { class: "row", "aria-label": label });
  }

  get cursor() {
    return this.cursors[this.at];
  }

  /** Draws the buttons after a page whose continuation is `next`, or null. */
  update(next) {
    this.cursors[this.at + 1] = next;
    const button = (text, to, isOff) =>
      el("button", { type: "button", disabled: isOff, on: { click: () => this.#turn(to) } }, text);
    const isSingle = !this.at && !next;
    put(
      this.place,
      isSingle ? [] : [
        button("Newer", this.at - 1, this.at === 0),
        el("span", { class: "muted small" }, `Page ${this.at + 1}`),
        button("Older", this.at + 1, !next),
      ],
    );
  }

  #turn(to) {
    this.at = to;
    scrollTo({ top: 0 });
    this.again();
  }
}

