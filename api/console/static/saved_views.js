// Saved views of a list: names for addresses, kept in this browser.

const VIEWS_MAX = 30;

/** @typedef {{name: string, query: string}} View */

/**
 * @param {string} list name of the list
 * @param {Pick<Storage, "getItem" | "setItem">} storage
 * @returns {View[]} in order of their names
 */
export function loadViews(list, storage) {
  try {
    const found = JSON.parse(storage.getItem(keyOf(list)) ?? "[]");
    return found.filter((each) => typeof each?.name === "string" && typeof each?.query === "string");
  } catch {
    return []; // another program, or an older version, has written it
  }
}

/**
 * Saves the view, replacing one of the same name. Returns all views.
 * @param {string} list
 * @param {View} view
 * @param {Pick<Storage, "getItem" | "setItem">} storage
 */
export function saveView(list, view, storage) {
  const others = loadViews(list, storage).filter((each) => each.name !== view.name);
  const views = [...others, view].sort((a, b) => a.name.localeCompare(b.name)).slice(0, VIEWS_MAX);
  storage.setItem(keyOf(list), JSON.stringify(views));
  return views;
}

/**
 * @param {string} list
 * @param {string} name
 * @param {Pick<Storage, "getItem" | "setItem">} storage
 */
export function deleteView(list, name, storage) {
  const views = loadViews(list, storage).filter((each) => each.name !== name);
  storage.setItem(keyOf(list), JSON.stringify(views));
  return views;
}

function keyOf(list) {
  return `ebbtide.views.${list}`;
}
