// Entry point: navigation, theme, live event stream and routing.

import { empty, el, put } from "./dom.js";
import { problemNote } from "./dialogs.js";
import { onEvent, startLive } from "./live.js";
import { whoAmI } from "./permissions.js";
import { enter, followOtherTabs, onSession, sessionKey, signOut } from "./session.js";
import { startTheme } from "./theme.js";
import { keepAges } from "./times.js";

/**
 * A page module. `title` takes the parameters of the path.
 * @typedef {{show: (root: HTMLElement, visit: Visit) => Promise<void>, title: (...params: string[]) => string}} Page
 * @typedef {{params: any, query: URLSearchParams, signal: AbortSignal}} Visit
 * @typedef {{path: RegExp, load: () => Promise<Page>, name?: string, href?: string, within?: string}} Route
 */

/** @type {Route[]} */
const PAGES = [
  { path: /^\/$/, load: () => import("./pages/overview.js"), name: "Overview", href: "#/" },
  { path: /^\/jobs$/, load: () => import("./pages/jobs.js"), name: "Jobs", href: "#/jobs" },
  { path: /^\/jobs\/([^/]+)$/, load: () => import("./pages/job.js"), within: "#/jobs" },
  { path: /^\/compare$/, load: () => import("./pages/compare.js"), within: "#/jobs" },
  { path: /^\/submit$/, load: () => import("./pages/submit.js"), name: "Submit", href: "#/submit" },
  { path: /^\/loans$/, load: () => import("./pages/loans.js"), name: "Loans", href: "#/loans" },
  { path: /^\/plans$/, load: () => import("./pages/plans.js"), name: "Plan explorer", href: "#/plans" },
  { path: /^\/simulate$/, load: () => import("./pages/simulations.js"), name: "Simulate", href: "#/simulate" },
  { path: /^\/simulate\/([^/]+)$/, load: () => import("./pages/simulation.js"), within: "#/simulate" },
];

const main = document.getElementById("main");
let leaving = new AbortController();
let pathShown = null;
let hasFailed = false;

function drawNavigation(current) {
  const links = PAGES.filter((page) => page.name).map((page) => {
    const isCurrent = page === current || current?.within === page.href;
    return el("li", {}, el("a", { href: page.href, "aria-current": isCurrent ? "page" : null }, page.name));
  });
  put(document.getElementById("nav"), el("ul", {}, links));
}

/** Closes the current page and opens the page of the URL's hash: `show(root, {params, query, signal})`. */
async function go() {
  leaving.abort();
  leaving = new AbortController();
  hasFailed = false;
  const { signal } = leaving;
  const [path, search = ""] = (location.hash.slice(1) || "/").split("?");
  const page = PAGES.find((each) => each.path.test(path));
  const isFirst = pathShown === null;
  const focusedId = path === pathShown ? document.activeElement?.id : ""; // same page with another query
  pathShown = path;
  drawNavigation(page);
  const root = el("div", { class: "page" }, el("p", { class: "loading" }, "Loading …"));
  put(main, root);
  if (!page) {
    document.title = "Page not found · Ebbtide";
    put(root, el("h1", {}, "Page not found"), noPage(path));
    return;
  }
  try {
    const params = path.match(page.path).slice(1).map(decodeURIComponent);
    const { show, title } = await page.load();
    if (signal.aborted) return;
    document.title = `${title(...params)} · Ebbtide`;
    await show(root, { params, query: new URLSearchParams(search), signal });
  } catch (error) {
    if (signal.aborted) return;
    hasFailed = true;
    put(root, el("div", { class: "stack" }, el("h1", {}, "This page failed to load"), problemNote(error)));
  }
  if (!isFirst && !signal.aborted) (document.getElementById(focusedId) ?? main).focus({ preventScroll: true });
}

function noPage(path) {
  const link = el("a", { href: "#/", class: "button" }, "Go to the overview");
  return empty(`The console has no page ${path}`, "Use the navigation to find a page.", link);
}

/** Shows the name of the signed-in user. Shows nothing while authentication is off. */
async function showUser() {
  const who = await whoAmI();
  if (!sessionKey()) return;
  const name = el("span", { class: "name", title: who.name }, who.name);
  const roles = el("span", { class: "muted" }, who.grants.join(", ") || "no role");
  const leave = el("button", { type: "button", class: "quiet", on: { click: signOut } }, "Sign out");
  put(document.getElementById("user"), el("p", {}, "Signed in as ", name), el("p", { class: "small" }, roles), leave);
}

/** Opens the page of a new hash. After a sign-in by login URL, the page starts again as the new user. */
async function enterAndGo() {
  const key = sessionKey();
  await enter();
  if (sessionKey() === key) await go();
  else location.reload();
}

const updateUser = () => showUser().catch(() => {}); // the page shows the error

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
startTheme(document.getElementById("theme"));
keepAges();
followOtherTabs();
await enter();
addEventListener("hashchange", enterAndGo);
go();
updateUser();
onSession(updateUser);
// Reload a page that failed to load once the service is reachable again.
onEvent((event) => event === null && hasFailed && location.reload(), new AbortController().signal);
startLive(document.getElementById("connection"));
