// Simulations page: replay recorded days with changes, submit files, and list simulations with their progress.

import { get, post } from "../api.js";
import { problemNote } from "../dialogs.js";
import { badge, bar, card, el, empty, put, table } from "../dom.js";
import { clearRefusals, field, showRefusals, values } from "../forms.js";
import { percent } from "../format.js";
import { keepUp } from "../live.js";
import { age } from "../times.js";
import { whatIfForm } from "./what_if.js";

export const title = () => "Simulate";

export async function show(root, { signal }) {
  const places = { refused: el("div", {}), list: el("div", {}) };
  const form = el("form", { novalidate: true }, fields());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearRefusals(form, places.refused);
    try {
      const made = await post("/v1/simulations", await documentOf(form), { signal });
      location.hash = `#/simulate/${made.id}`;
    } catch (error) {
      showRefusals(form, places.refused, error);
    }
  });
  const submitted = el("details", {}, el("summary", {}, "Simulate files of your own"), form);
  const whatIf = await whatIfForm(places.refused, signal);
  const contents = el("div", { class: "stack" }, places.refused, whatIf, whatIf ? submitted : form, places.list);
  put(root, el("div", { class: "head" }, el("h1", {}, "Simulate")), contents);
  const refresh = async () => {
    const { items } = await get("/v1/simulations", { query: { limit: 50 }, signal });
    put(places.list, card("Simulations", listed(items)));
  };
  const failed = (error) => error && put(places.list, problemNote(error));
  keepUp(refresh, { signal, everyS: 2, wants: () => false, failed });
}

function fields() {
  const file = (name, label, hint, accept) => field(name, label, { kind: "file", hint, accept });
  const takes = ": jobs and demand as CSV, the fleet as YAML. The simulation runs in the background.";
  const intro = el("p", { class: "muted small" }, "Same input as ", el("code", {}, "ebbtide simulate"), takes);
  return card("New simulation", intro, el("div", { class: "form" },
    file("jobs", "Jobs", "CSV, one job per row.", ".csv,.txt"),
    file("demand", "Inference demand", "CSV, optional.", ".csv,.txt"),
    file("cluster", "Fleet", "YAML with pools and nodes.", ".yaml,.yml,.json"),
    field("policies", "Policy sets", { value: "ebbtide, fifo", hint: "Comma-separated." }),
    field("seed", "Seed", { kind: "number", value: 0 })),
    el("div", { class: "row" }, el("button", { class: "first", type: "submit" }, "Start simulation")));
}

async function documentOf(form) {
  const { policies = "ebbtide", seed = 0 } = values(form);
  const text = async (name) => (await form.elements[name].files[0]?.text()) ?? "";
  const label = { jobs: await text("jobs"), demand: await text("demand"), cluster: await text("cluster"), seed };
  for (const name of ["jobs", "cluster"]) {
    const errors = [{ field: name, value: null, allowed: "a file" }];
    if (!label[name]) throw Object.assign(new Error(`${name} is missing`), { errors });
  }
  return { ...label, policies: policies.split(",").map((name) => name.trim()).filter(Boolean) };
}

function listed(items) {
  const todo = "Start a replay or submit files above. The report compares policy sets on your own jobs.";
  if (!items.length) return empty("No simulations yet", todo);
  const rows = items.map((each) => [
    el("a", { href: `#/simulate/${each.id}` }, each.id),
    badge(each.state),
    each.description.split("\n")[0] || "submitted files",
    each.policies.join(", "),
    progress(each),
    age(each.created_at_s),
  ]);
  const columns = [["Simulation"], ["State"], ["Input"], ["Policy sets"], ["Progress"], ["Submitted", true]];
  return table("Simulations", columns, rows);
}

export function progress(each) {
  const label = percent(each.progress.fraction);
  const drawn = bar(`${label} done`, [["training", each.progress.fraction]]);
  return el("div", { class: "done" }, drawn, el("span", { class: "small" }, label));
}
