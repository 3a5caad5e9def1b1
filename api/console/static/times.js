// Time elements: local time with UTC on hover, and ages that update every second.

import { el, say } from "./dom.js";
import { ago, duration, time, utc } from "./format.js";

const EVERY_MS = 1000;
const FORMATS = { ago, for: (atS, nowS) => duration(Math.max(0, Math.round(nowS - atS))) };

export function when(atS, props = {}) {
  return el("time", { datetime: new Date(1000 * atS).toISOString(), title: utc(atS), ...props }, time(atS));
}

/** Formats an age: "3 min ago" or "in 20 s"; with `format` "for": "3 min". */
export function age(atS, format = "ago") {
  const at = when(atS);
  Object.assign(at.dataset, { format, at: atS });
  at.title = `${time(atS)}, ${utc(atS)}`;
  at.textContent = FORMATS[format](atS, Date.now() / 1000);
  return at;
}

/** Formats a time and its distance from now: 21:49:12 (in 20 s). */
export function due(atS) {
  return el("span", {}, when(atS), " (", age(atS), ")");
}

export function keepAges() {
  setInterval(() => {
    if (document.hidden) return;
    /** @type {NodeListOf<HTMLTimeElement>} */
    const ages = document.querySelectorAll("time[data-format]");
    for (const each of ages) {
      say(each, FORMATS[each.dataset.format](Number(each.dataset.at), Date.now() / 1000));
    }
  }, EVERY_MS);
}
