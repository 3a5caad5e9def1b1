// Card of a job's step time: predicted by the cost model, expected from other jobs' steps, and measured.

import { card, el, facts } from "../dom.js";
import { duration, percent } from "../format.js";

const MARGIN = 0.25;
const SLOW = "Look for a slow node, a slow network, or input that is not ready in time.";

/** `step`: of the job's plan. Returns null if there is nothing to compare. */
export function stepCard(step) {
  const { predicted_s: predictedS, expected_s: expectedS, interval_s: interval, measured_s: measuredS } = step;
  if (measuredS === null && interval === null) return null;
  const range = interval && `${duration(interval[0])} to ${duration(interval[1])} in 80% of cases`;
  return card(
    ["Step time", el("span", { class: "small muted" }, "of the current plan")],
    el("p", {}, verdict(step)),
    drawing(step),
    facts([
      ["Measured", measuredS === null ? "not reported yet" : duration(measuredS)],
      ["Expected from other jobs' steps", expectedS !== null && `${duration(expectedS)}; ${range}`],
      ["Predicted by the cost model", duration(predictedS)],
    ]),
  );
}

function verdict({ predicted_s: predictedS, expected_s: expectedS, interval_s: interval, measured_s: measuredS }) {
  if (measuredS === null) return "The job has not reported its steps yet.";
  const usualS = expectedS ?? predictedS;
  const change = measuredS / usualS - 1;
  const way = `${change >= 0 ? "longer" : "shorter"} than ${expectedS ? "expected" : "predicted"}`;
  const size = `${percent(Math.abs(change))} ${way}`;
  if (!interval) return `A step takes ${size}.`;
  if (measuredS > interval[1]) return `A step takes ${size}, above the expected interval. ${SLOW}`;
  if (measuredS < interval[0]) return `A step takes ${size}, below the expected interval.`;
  return `A step takes ${size}, within the expected interval.`;
}

/** Draws the interval as a band, and the three times as marks, on a common scale. */
function drawing({ predicted_s: predictedS, expected_s: expectedS, interval_s: interval, measured_s: measuredS }) {
  const known = [predictedS, expectedS, measuredS, ...(interval ?? [])].filter((each) => each !== null);
  const low = Math.min(...known);
  const high = Math.max(...known);
  const margin = MARGIN * (high - low || high);
  const start = Math.max(0, low - margin);
  const place = (seconds) => `${(100 * (seconds - start)) / (high + margin - start)}%`;
  const mark = (kind, seconds, name) => seconds !== null
    && el("span", { class: `mark ${kind}`, title: `${name} ${duration(seconds)}`, vars: { "--at": place(seconds) } },
      el("span", {}, name));
  const band = interval && el("span", {
    class: "band",
    vars: { "--at": place(interval[0]), "--end": place(interval[1]) },
  });
  return el("div", { class: "step-scale", "aria-hidden": "true" }, band,
    mark("predicted", predictedS, "predicted"), mark("expected", expectedS, "expected"),
    mark("measured", measuredS, "measured"));
}
