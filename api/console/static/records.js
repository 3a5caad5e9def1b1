// Records, newest first: events and recalls.

import { el, empty } from "./dom.js";
import { arrows, words } from "./format.js";
import { when } from "./times.js";

/** Renders events as a list. `none`: shown if there are none. */
export function eventRecord(events, none) {
  if (!events.length) return empty("No events yet", none);
  const entry = (event) => el("li", {}, when(event.at_s),
    el("span", {}, el("strong", {}, words(event.code)), " ", arrows(event.message)));
  return el("ol", { class: "record" }, events.map(entry));
}

/** Renders a document as indented JSON. */
export function documentText(label, value) {
  const text = JSON.stringify(value, null, 2);
  return el("pre", { class: "document", tabindex: "0", role: "region", "aria-label": label }, text);
}
