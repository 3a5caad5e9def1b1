// Elements out of plain values. Texts become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
const COPIED_MS = 1500;
const drawn = new WeakMap();

/** An element. `props`: attributes; `on` holds listeners, `vars` CSS variables, `data` data attributes. */
export function el(tag, props = {}, ...children) {
  return dressed(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return dressed(document.createElementNS(SVG, tag), props, children);
}

function dressed(node, { on = {}, vars = {}, data = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  for (const [name, value] of Object.entries(vars)) node.style.setProperty(name, value);
  Object.assign(node.dataset, data);
  node.append(...present(children));
  return node;
}

/** Nested lists laid flat, without what is not there. */
function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** New contents. Whoever stood on a link, a button or a table, or had scrolled sideways, stays there. */
export function put(node, ...children) {
  const at = document.activeElement;
  const focused = at !== node && node.contains(at) ? at : null;
  const scrolledPx = node.querySelector(".scroll")?.scrollLeft ?? 0;
  node.replaceChildren(...present(children));
  if (focused) heir(node, focused)?.focus({ preventScroll: true });
  if (scrolledPx) node.querySelector(".scroll")?.scrollTo({ left: scrolledPx });
  return node;
}

/** What has taken the place of an element that had the focus: the same link or region, or else the first button. */
function heir(node, gone) {
  const href = gone.getAttribute("href");
  const label = gone.getAttribute("aria-label");
  if (href) return node.querySelector(`a[href="${CSS.escape(href)}"]`);
  if (label) return node.querySelector(`[aria-label="${CSS.escape(label)}"]`);
  const buttons = [...node.querySelectorAll("button")];
  return buttons.find((each) => each.textContent === gone.textContent) ?? buttons[0];
}

/** Draws into `node` only where `key`, all that the drawing depends on, has changed since. */
export function redraw(node, key, draw) {
  if (drawn.get(node) === key) return;
  drawn.set(node, key);
  put(node, draw());
}

/** A text that is only written where it differs, so that screen readers are not told again what stays. */
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

/** What stands where nothing is yet: a title, and what to do next. */
export function empty(title, ...next) {
  const lines = next.map((each) => (typeof each === "string" ? el("p", {}, each) : each));
  return el("div", { class: "empty" }, el("strong", {}, title), lines);
}

/** A list of [term, value] as facts; values that are null are left out. */
export function facts(pairs) {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined && value !== false && value !== "");
  return el("dl", { class: "facts" }, told.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}

/** A table. `columns`: [heading, is a number]; `rows`: arrays of texts or nodes, the first of which is the heading. */
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

/** Shares of a whole as one bar: [state, share of 1, words]. */
export function bar(label, parts) {
  const spans = parts.map(([state, share]) => el("span", { data: { state }, vars: { "--share": `${100 * share}%` } }));
  return el("div", { class: "bar", role: "img", "aria-label": label }, spans);
}

/** One large figure with its name above and what it means below. */
export function figureOf(state, name, value, unit, below) {
  const told = el("dd", {}, value, unit && el("small", {}, unit));
  return el("div", { class: "figure", data: { state } }, el("dt", {}, name), told, el("dd", { class: "muted" }, below));
}

/** A button that puts `text`, or what it gives, into the clipboard. */
export function copyButton(what, text) {
  const name = `Copy ${what}`;
  const tell = (button, word, label = word) => {
    button.textContent = word;
    button.setAttribute("aria-label", label);
  };
  const copy = async ({ currentTarget: button }) => {
    const given = typeof text === "function" ? text() : text;
    await navigator.clipboard.writeText(given).then(() => tell(button, "Copied"), () => tell(button, "Not allowed"));
    setTimeout(() => tell(button, "Copy", name), COPIED_MS);
  };
  if (!navigator.clipboard) return null; // only pages that came safely have one
  return el("button", { type: "button", class: "small copy", "aria-label": name, on: { click: copy } }, "Copy");
}
