// Charts of a pool's safety report by day. The page of the pool and report files share them.

const DAY_S = 86_400;
const LENT = "GPU-hours that training could use, by day (UTC).";
const RETURNS = "The largest share of its deadline that a return of a node used, by the day of the recall. A return "
  + "above 100% was late.";
const SHORT = "Intervals of five minutes in which loans left inference short, by day.";

/**
 * Returns the charts of a month. Nothing is drawn of a month without loans and demand readings.
 * @param {any} report as in /v1/pools/{name}/safety-report
 * @returns {import("../types/charts").Chart[]}
 */
export function safetyCharts({ daily }) {
  if (!daily.length) return [];
  const days = daily.map((each) => each.start_s);
  const column = (name) => daily.map((each) => each[name]);
  /** @returns {import("../types/charts").Chart} */
  const chart = (title, caption, unit, series, ...columns) => ({
    title,
    caption,
    spec: { label: title, xs: "Day", xFormat: "day", unit, height: 180, together: "safety", series },
    data: [days, ...columns],
    span: [days[0] - DAY_S / 2, days.at(-1) + DAY_S / 2],
  });
  const used = column("deadline_ratio_max").map((ratio) => (ratio === null ? null : 100 * ratio));
  const recalls = { label: "Recalls", unit: "", apart: true };
  return [
    chart("GPU-hours lent", LENT, "GPU-hours", [{ label: "Lent", bars: true, fill: "lent" }], column("lent_gpu_hours")),
    chart("Returns against their deadline", RETURNS, "%", [
      { label: "Slowest return", colour: "training", points: "only" },
      { label: "Deadline", colour: "recalled", dash: [6, 4], width: 1 },
      recalls,
    ], used, days.map(() => 100), column("recalls")),
    chart("Short intervals", SHORT, "intervals", [{ label: "Short", bars: true, fill: "recalled" }],
      column("short_intervals")),
  ];
}
