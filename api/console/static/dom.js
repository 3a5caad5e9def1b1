// Elements out of plain values. Texts become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
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

/** New contents. Whoever stood on a link, or had scrolled sideways, stays there. */
export function put(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const scrolledPx = node.querySelector(".scroll")?.scrollLeft ?? 0;
  node.replaceChildren(...present(children));
  if (focused) node.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  if (scrolledPx) node.querySelector(".scroll")?.scrollTo({ left: scrolledPx });
  return node;
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
  return el("section", { class: "card", "aria-label": heading }, el("header", {}, el("h2", {}, heading), extra), children);
}

export function badge(state, text = state) {
  return el("span", { class: "badge", data: { state } }, text);
}

/** What stands where nothing is yet: a title, and what to do next. */
export function empty(title, ...next) {
  return el("div", { class: "empty" }, el("strong", {}, title), next.map((each) => (typeof each === "string" ? el("p", {}, each) : each)));
}

/** A list of [term, value] as facts; values that are null are left out. */
export function facts(pairs) {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined && value !== false && value !== "");
  return el("dl", { class: "facts" }, told.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}

/** A table. `columns`: [heading, is a number]; `rows`: arrays of texts or nodes. The first cell of a row is its heading. */
export function table(caption, columns, rows) {
  const cell = (value, at) => {
    const kind = { class: columns[at][1] ? "number" : null };
    return at === 0 ? el("th", { ...kind, scope: "row" }, value) : el("td", kind, value);
  };
  const head = columns.map(([name, isNumber]) => el("th", { scope: "col", class: isNumber ? "number" : null }, name));
  const body = rows.map((row) => el("tr", {}, row.map(cell)));
  const whole = el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
}

/** Shares of a whole as one bar: [state, share of 1, words]. */
export function bar(label, parts) {
  const spans = parts.map(([state, share]) => el("span", { data: { state }, vars: { "--share": `${100 * share}%` } }));
  return el("div", { class: "bar", role: "img", "aria-label": label }, spans);
}
