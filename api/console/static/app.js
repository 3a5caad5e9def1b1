// Entry point: navigation, theme, live event stream and routing.

import { empty, el, put } from "./dom.js";
import { problemNote } from "./dialogs.js";
import { onEvent, startLive } from "./live.js";
import { Navigation } from "./navigation.js";
import { whoAmI } from "./permissions.js";
import { startProblems } from "./problem_feed.js";
import { enter, followOtherTabs, onSession, sessionKey, signOut } from "./session.js";
import { startTheme } from "./theme.js";
import { keepAges } from "./times.js";

/**
 * A page module. `title` takes the parameters of the path.
 * @typedef {{show: (root: HTMLElement, visit: Visit) => Promise<void>, title: (...params: string[]) => string}} Page
 * @typedef {{params: any, query: URLSearchParams, signal: AbortSignal}} Visit
 * @typedef {{path: RegExp, load: () => Promise<Page>, name?: string, href?: string, group?: string,
 * role?: string, within?: string}} Route
 */

/**
 * The pages, in the order of the navigation. A page with a `name` is listed in its `group`, for users with `role`.
 * @type {Route[]}
 */
const PAGES = [
  { path: /^\/$/, load: () => import("./pages/overview.js"), name: "Overview", href: "#/", group: "Fleet" },
  { path: /^\/nodes$/, load: () => import("./pages/nodes.js"), name: "Nodes", href: "#/nodes", group: "Fleet" },
  { path: /^\/nodes\/([^/]+)$/, load: () => import("./pages/node_page.js"), within: "#/nodes" },
  { path: /^\/pools$/, load: () => import("./pages/pools.js"), name: "Pools", href: "#/pools", group: "Fleet" },
  { path: /^\/pools\/([^/]+)$/, load: () => import("./pages/pool_page.js"), within: "#/pools" },
  { path: /^\/loans$/, load: () => import("./pages/loans.js"), name: "Loans", href: "#/loans", group: "Fleet" },
  { path: /^\/jobs$/, load: () => import("./pages/jobs.js"), name: "Jobs", href: "#/jobs", group: "Work" },
  { path: /^\/jobs\/([^/]+)$/, load: () => import("./pages/job.js"), within: "#/jobs" },
  { path: /^\/compare$/, load: () => import("./pages/compare.js"), within: "#/jobs" },
  { path: /^\/queues$/, load: () => import("./pages/queues.js"), name: "Queues", href: "#/queues", group: "Work" },
  { path: /^\/queues\/([^/]+)$/, load: () => import("./pages/queue_page.js"), within: "#/queues" },
  { path: /^\/submit$/, load: () => import("./pages/submit.js"), name: "Submit", href: "#/submit", group: "Work" },
  { path: /^\/alerts$/, load: () => import("./pages/alerts.js"), name: "Alerts", href: "#/alerts", group: "Fleet" },
  { path: /^\/gantt$/, load: () => import("./pages/gantt.js"), name: "Gantt", href: "#/gantt", group: "Insight" },
  { path: /^\/savings$/, load: () => import("./pages/savings.js"), name: "Savings", href: "#/savings",
    group: "Insight" },
  { path: /^\/plans$/, load: () => import("./pages/plans.js"), name: "Plan explorer", href: "#/plans",
    group: "Insight" },
  { path: /^\/simulate$/, load: () => import("./pages/simulations.js"), name: "Simulate", href: "#/simulate",
    group: "Insight" },
  { path: /^\/simulate\/([^/]+)$/, load: () => import("./pages/simulation.js"), within: "#/simulate" },
  { path: /^\/decisions$/, load: () => import("./pages/decisions.js"), name: "Decisions", href: "#/decisions",
    group: "Insight" },
  { path: /^\/audit$/, load: () => import("./pages/audit.js"), name: "Audit log", href: "#/audit",
    group: "Administration", role: "admin" },
  { path: /^\/tokens$/, load: () => import("./pages/tokens.js"), name: "API tokens", href: "#/tokens",
    group: "Administration", role: "admin" },
  { path: /^\/secrets$/, load: () => import("./pages/secrets.js"), name: "Secrets", href: "#/secrets",
    group: "Administration", role: "submitter" },
  { path: /^\/webhooks$/, load: () => import("./pages/webhooks.js"), name: "Webhooks", href: "#/webhooks",
    group: "Administration", role: "queue-admin" },
  { path: /^\/webhooks\/([^/]+)$/, load: () => import("./pages/webhook_page.js"), within: "#/webhooks" },
  { path: /^\/settings$/, load: () => import("./pages/settings.js"), name: "Settings", href: "#/settings",
    group: "Administration", role: "admin" },
];

const main = document.getElementById("main");
const [nav, menu] = ["nav", "menu"].map((id) => document.getElementById(id));
const navigation = new Navigation(nav, menu, PAGES);
let leaving = new AbortController();
let pathShown = null;
let hasFailed = false;

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
  navigation.show(page);
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

/** Lists the user's pages and shows the user's name. Shows no name while authentication is off. */
async function showUser() {
  const who = await whoAmI();
  navigation.allow(who);
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
startProblems(document.getElementById("nav"));
