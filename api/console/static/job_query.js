// State of the list of jobs in the address: filters and order, and the request that they stand for.

const DAY_S = 86400;
const RECENT = "recent";

/** Filters with their defaults. `recent`: live jobs, and jobs that failed in the last 24 hours. */
export const DEFAULTS = { state: RECENT, search: "", queue: "", owner: "", selector: "", sort: "-submitted" };

/**
 * Returns the filters of an address.
 * @param {URLSearchParams} query
 */
export function wantedOf(query) {
  return Object.fromEntries(Object.entries(DEFAULTS).map(([name, usual]) => [name, query.get(name) ?? usual]));
}

/**
 * Returns the address of filters, without those at their defaults.
 * @param {Record<string, string>} wanted
 */
export function addressOf(wanted) {
  const given = Object.entries(wanted).filter(([name, value]) => value !== DEFAULTS[name]);
  const text = new URLSearchParams(given).toString();
  return text ? `#/jobs?${text}` : "#/jobs";
}

/**
 * Returns the query of `GET /v1/jobs`.
 * @param {Record<string, string>} wanted
 */
export function requestOf(wanted) {
  const { state, ...others } = wanted;
  return state === RECENT ? { ...others, state: "live,failed", ended_max_age_s: DAY_S } : { ...others, state };
}

/** Returns whether any filter differs from its default. */
export function isFiltered(wanted) {
  return Object.keys(DEFAULTS).some((name) => name !== "sort" && wanted[name] !== DEFAULTS[name]);
}

/**
 * Returns the order after a press on a column's heading: by the column, and the other way round if it is already.
 * @param {string} sort
 * @param {string} column
 * @param {boolean} isDescendingFirst
 */
export function nextSort(sort, column, isDescendingFirst) {
  if (sort === column) return `-${column}`;
  if (sort === `-${column}`) return column;
  return isDescendingFirst ? `-${column}` : column;
}
