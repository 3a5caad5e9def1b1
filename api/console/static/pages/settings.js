// Settings page: the settings of the service with their sources. Read only; values of secrets are not included.

import { get } from "../api.js";
import { card, el, empty, redraw, table } from "../dom.js";
import { count, plural } from "../format.js";
import { addressOf, filterForm, readFilters } from "../listing.js";
import { keepUp } from "../live.js";
import { PageFrame } from "../page_frame.js";

const USUAL = { name: "", show: "all" };
const FILTERS = [
  { name: "name", label: "Name or description contains" },
  { name: "show", label: "Show", options: [["all", "All settings"], ["set", "Set by the environment"]] },
];

export const title = () => "Settings";

export async function show(root, { query, signal }) {
  const wanted = readFilters(query, USUAL);
  const frame = new PageFrame(root, "Settings");
  const list = el("div");
  let settings = null;
  const draw = () => {
    const found = settings.filter((setting) => isMatch(setting, wanted));
    const set = settings.filter((setting) => setting.source === "environment").length;
    const number = `${plural(settings.length, "setting")}, ${count(set)} set by the environment`;
    frame.describe(`${number}. Changes take effect when the service restarts.`);
    redraw(list, JSON.stringify(found), () => contents(found));
  };
  const changed = (given) => {
    Object.assign(wanted, given);
    history.replaceState(null, "", addressOf("/settings", wanted, USUAL));
    if (settings) draw();
  };
  const form = filterForm("Filter settings", FILTERS, wanted, { isLive: true, changed });
  const refresh = async () => {
    settings = (await get("/v1/settings", { signal })).items;
    frame.fill(() => [form, list]);
    draw();
  };
  keepUp(refresh, { signal, everyS: 60, wants: () => false, failed: frame.failed });
}

function isMatch({ name, variable, description, source }, wanted) {
  const part = wanted.name.toLowerCase();
  const text = `${name} ${variable} ${description}`.toLowerCase();
  return text.includes(part) && (wanted.show !== "set" || source === "environment");
}

function contents(settings) {
  if (!settings.length) {
    const all = el("a", { href: "#/settings", class: "button" }, "All settings");
    return card("No settings", empty("No matching settings", "Change or clear the filters.", all));
  }
  const row = (setting) => [
    el("div", { class: "setting" }, el("code", {}, setting.variable),
      el("p", { class: "small muted" }, setting.description)),
    valueOf(setting, setting.value),
    setting.source,
    setting.source === "default" ? "" : valueOf(setting, setting.default),
  ];
  const shown = table("Settings of the service", [["Setting"], ["Value"], ["Source"], ["Default"]], settings.map(row));
  shown.querySelector("table").classList.add("wrapping");
  return el("section", { class: "card", "aria-label": "Settings" }, shown);
}

function valueOf({ secret, source }, value) {
  if (secret) return el("span", { class: "muted" }, source === "environment" ? "set, not shown" : "not set");
  if (value === null || value === "") return el("span", { class: "muted" }, "not set");
  return el("code", {}, typeof value === "string" ? value : JSON.stringify(value));
}
