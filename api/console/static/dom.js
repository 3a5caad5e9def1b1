// DOM helpers. Strings become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
const COPIED_MS = 1500;
const drawn = new WeakMap();

/** Creates an element. `props`: attributes, and `on` (listeners), `vars` (CSS variables), `data` (data attributes). */
export function el(tag, props = {}, ...children) {
  return applyProps(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return applyProps(document.createElementNS(SVG, tag), props, children);
}

function applyProps(node, { on = {}, vars = {}, data = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  for (const [name, value] of Object.entries(vars)) node.style.setProperty(name, value);
  Object.assign(node.dataset, data);
  node.append(...flatten(children));
  return node;
}

/** Flattens nested lists and drops null, undefined and false. */
function flatten(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replaces the contents of `node`. Keeps keyboard focus and horizontal scroll position. */
export function put(node, ...children) {
  const at = document.activeElement;
  const focused = at !== node && node.contains(at) ? at : null;
  const scrolledPx = node.querySelector(".scroll")?.scrollLeft ?? 0;
  node.replaceChildren(...flatten(children));
  if (focused) findSuccessor(node, focused)?.focus({ preventScroll: true });
  if (scrolledPx) node.querySelector(".scroll")?.scrollTo({ left: scrolledPx });
  return node;
}

/** Finds the successor of an element that had the focus: the same link or region, else the first button. */
function findSuccessor(node, gone) {
  const href = gone.getAttribute("href");
  const label = gone.getAttribute("aria-label");
  if (href) return node.querySelector(`a[href="${CSS.escape(href)}"]`);
  if (label) return node.querySelector(`[aria-label="${CSS.escape(label)}"]`);
  const buttons = [...node.querySelectorAll("button")];
  return buttons.find((each) => each.textContent === gone.textContent) ?? buttons[0];
}

/** Redraws `node` only if `key`, which covers all inputs of the drawing, has changed. */
export function redraw(node, key, draw) {
  if (drawn.get(node) === key) return;
  drawn.set(node, key);
  put(node, draw());
}

/** Sets the text of `node` only if it differs, so that screen readers do not repeat it. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function card(title, ...children) {
  const [heading, extra] = Array.isArray(title) ? title : [title];
  const head = el("header", {}, el("h2", {}, heading), extra);
  return el("section", { class: "card", "aria-label": heading }, head, children);
}

export function badge(state, text = state) {
  return el("span", { class: "badge", data: { state } }, text);
}

/** An empty state: a title and the next steps. */
export function empty(title, ...next) {
  const lines = next.map((each) => (typeof each === "string" ? el("p", {}, each) : each));
  return el("div", { class: "empty" }, el("strong", {}, title), lines);
}

/** A description list of [term, value] pairs. Empty values are omitted. */
export function facts(pairs) {
  const entries = pairs.filter(([, value]) => value !== null && value !== undefined && value !== false && value !== "");
  return el("dl", { class: "facts" }, entries.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}

/** A table. `columns`: [heading, is a number]; `rows`: arrays of strings or nodes, the first is the row heading. */
export function table(caption, columns, rows) {
  const cell = (value, at) => {
    const kind = { class: columns[at][1] ? "number" : null };
    return at === 0 ? el("th", { ...kind, scope: "row" }, value) : el("td", kind, value);
  };
  const head = columns.map(([name, isNumber]) => el("th", { scope: "col", class: isNumber ? "number" : null }, name));
  const body = rows.map((row) => el("tr", {}, row.map(cell)));
  const title = el("caption", { class: "unseen" }, caption);
  const whole = el("table", {}, title, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

/** A stacked bar. `parts`: [state, share from 0 to 1]. */
export function bar(label, parts) {
  const spans = parts.map(([state, share]) => el("span", { data: { state }, vars: { "--share": `${100 * share}%` } }));
  return el("div", { class: "bar", role: "img", "aria-label": label }, spans);
}

/** One large figure with its name above and an explanation below. */
export function figureOf(state, name, value, unit, below) {
  const number = el("dd", {}, value, unit && el("small", {}, unit));
  const note = el("dd", { class: "muted" }, below);
  return el("div", { class: "figure", data: { state } }, el("dt", {}, name), number, note);
}

/** A button that copies `text`, a string or a function that returns one, to the clipboard. */
export function copyButton(what, text) {
  const name = `Copy ${what}`;
  const setLabel = (button, word, label = word) => {
    button.textContent = word;
    button.setAttribute("aria-label", label);
  };
  const copy = async ({ currentTarget: button }) => {
    const given = typeof text === "function" ? text() : text;
    const copied = navigator.clipboard.writeText(given);
    await copied.then(() => setLabel(button, "Copied"), () => setLabel(button, "Copy failed"));
    setTimeout(() => setLabel(button, "Copy", name), COPIED_MS);
  };
  if (!navigator.clipboard) return null; // browsers offer it in secure contexts only
  return el("button", { type: "button", class: "small copy", "aria-label": name, on: { click: copy } }, "Copy");
}
