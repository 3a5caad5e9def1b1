// Report files: draws the console's charts from the JSON data in the page. `api/console_assets.py` inlines this module.

import { ChartCards } from "./chart_cards.js";
import { card } from "./dom.js";
import { curveChart, planTable } from "./plan_curve_chart.js";
import { safetyCharts } from "./safety_charts.js";
import { simulationCharts, styleOf } from "./simulation_charts.js";
import { followSystem } from "./theme.js";

/** @type {Record<string, (data: any) => import("../types/charts").Chart[]>} */
const CHARTS = {
  simulation: ({ series }) => simulationCharts(series.map((each) => ({ label: each.policy, series: each }))),
  safety: safetyCharts,
  curve: ({ points }) => [curveChart(points)],
};

/** Gives the key of each policy set in a table the style of its lines. */
function styleKeys() {
  /** @type {NodeListOf<HTMLElement>} */
  const keys = document.querySelectorAll("[data-line]");
  for (const key of keys) {
    const { colour, dash } = styleOf(Number(key.dataset.line));
    key.style.setProperty("--c", `var(--${colour})`);
    key.classList.toggle("dashed", Boolean(dash));
  }
}

followSystem();
styleKeys();
const { kind, data } = JSON.parse(document.getElementById("data").textContent);
const place = document.getElementById("charts");
new ChartCards(new AbortController().signal, place).update(CHARTS[kind](data));
if (kind === "curve") place.after(card("Plans", planTable(data.points)));
