// Tokens page: API tokens, their roles and use; create and revoke.

import { ask, get } from "../api.js";
import { actionButton } from "../actions.js";
import { badge, card, el, empty, redraw, table } from "../dom.js";
import { formDialog } from "../form_dialog.js";
import { plural } from "../format.js";
import { field, values } from "../forms.js";
import { addressOf, filterForm, readFilters } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";
import { whoAmI } from "../permissions.js";
import { revealOnce } from "../secret_reveal.js";
import { age, due, when } from "../times.js";

const TOKENS_MAX = 1000;
const DAY_S = 86_400;
const USUAL = { name: "", show: "valid" };
const FILTERS = [
  { name: "name", label: "Name contains" },
  { name: "show", label: "Show", options: [["valid", "Valid tokens"], ["all", "All tokens"]] },
];
const LIFETIMES = [[String(90 * DAY_S), "90 days"], [String(30 * DAY_S), "30 days"], [String(7 * DAY_S), "7 days"],
  [String(365 * DAY_S), "1 year"], ["", "No expiry"]];
const ROLES = [["submitter", "submitter: submits and changes own jobs"], ["viewer", "viewer: reads"],
  ["queue-admin", "queue-admin: changes all jobs and the quota"], ["admin", "admin: everything"]];

export const title = () => "API tokens";

export async function show(root, { query, signal }) {
  const wanted = readFilters(query, USUAL);
  const frame = new PageFrame(root, "API tokens");
  const list = el("div");
  let tokens = null;
  let who = null;
  const draw = () => drawTokens(list, { tokens, wanted, who, frame, again: () => again() });
  const changed = (given) => {
    Object.assign(wanted, given);
    history.replaceState(null, "", addressOf("/tokens", wanted, USUAL));
    if (tokens) draw();
  };
  const form = filterForm("Filter tokens", FILTERS, wanted, { isLive: true, changed });
  const refresh = async () => {
    const [page, user] = await Promise.all([get("/v1/tokens", { query: { limit: TOKENS_MAX }, signal }), whoAmI()]);
    [tokens, who] = [page.items, user];
    frame.fill(() => [form, list]);
    frame.offer([{ name: "Create a token", open: () => create(() => again()) }], () => again());
    draw();
  };
  const again = keepUp(refresh, { signal, everyS: 30, wants: () => false, failed: frame.failed });
}

function isValid(token) {
  return !token.revoked_at_s && !(token.expires_at_s && token.expires_at_s < Date.now() / 1000);
}

function drawTokens(list, { tokens, wanted, who, frame, again }) {
  const part = wanted.name.toLowerCase();
  const found = tokens.filter((token) =>
    token.name.toLowerCase().includes(part) && (wanted.show === "all" || isValid(token)));
  frame.describe(plural(found.length, "token"));
  redraw(list, JSON.stringify([found, wanted]), () => {
    if (!found.length) {
      const how = tokens.length ? "Change the filter, or create a token."
        : "Create a token for each person and program.";
      return card("No tokens", empty("No tokens", how));
    }
    const options = { refused: frame.refused, acted: again };
    const rows = found.map((token) => row(token, who, options));
    const columns = [["Name"], ["Roles"], ["State"], ["Begins with"], ["Created"], ["Last used"], ["Expires"], [""]];
    return el("section", { class: "card", "aria-label": "API tokens" }, table("API tokens", columns, rows));
  });
}

function row(token, who, options) {
  const isOwn = token.id === who.token_id;
  const revoke = {
    name: "Revoke",
    title: `Revoke the token of ${token.name}?`,
    what: [
      "Every process rejects it within 5 s. It cannot be restored.",
      isOwn ? "You are signed in with it: this ends your session." : null,
    ].filter(Boolean),
    method: "DELETE",
    path: `/v1/tokens/${encodeURIComponent(token.id)}`,
    done: `The token of ${token.name} is revoked.`,
    danger: true,
  };
  const name = token.account ? `${token.name} (service account)` : token.name;
  return [
    isOwn ? [name, el("span", { class: "small muted" }, " this session")] : name,
    token.grants.join(", "),
    stateBadge(token),
    el("code", {}, `${token.prefix}…`),
    el("span", {}, when(token.created_at_s), ` by ${token.created_by}`),
    token.last_used_at_s ? age(token.last_used_at_s) : "never",
    token.expires_at_s ? due(token.expires_at_s) : "never",
    isValid(token) ? actionButton(revoke, options) : "",
  ];
}

function stateBadge(token) {
  if (token.revoked_at_s) return badge("down", "revoked");
  return isValid(token) ? badge("inference", "valid") : badge("down", "expired");
}

async function create(again) {
  const content = el("div", { class: "form" },
    field("name", "Name", { hint: "Display name of the person or program.", required: true }),
    field("role", "Role", { options: ROLES }),
    field("queue", "Queue", { hint: "Empty: all queues." }),
    field("expires_in_s", "Lifetime", { options: LIFETIMES }));
  const made = await formDialog("Create a token", content, "Create", (form) => {
    const { name, role, queue, expires_in_s: lifetime } = values(form);
    const grants = [queue && role !== "admin" ? `${role}:${queue}` : role];
    const body = { name, grants, expires_in_s: lifetime ? Number(lifetime) : null };
    return ask("POST", "/v1/tokens", { body });
  });
  if (!made) return;
  await revealOnce(`Token of ${made.name}`, "token", made.secret);
  again();
}
