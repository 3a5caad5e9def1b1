// Demand of an inference pool, its capacity and the demand forecast.

import { get } from "../api.js";
import { card, el, empty, figureOf, put } from "../dom.js";
import { duration, figure, gpus, percent } from "../format.js";
import { chart } from "../plotting.js";

/** @type {[string, number][]} */
const SPANS = [["1 h", 3600], ["3 h", 10800], ["24 h", 86400]];
const POINTS_MAX = 900;
const KEPT_S = 90_000;

export class DemandChart {
  constructor(pool, signal) {
    this.pool = pool;
    this.signal = signal;
    this.readings = [];
    this.spanS = SPANS[1][1];
    this.body = el("div", {});
    this.place = card([`Demand of ${pool}`, this.#spans()], this.body);
  }

  /** Loads new readings and redraws the chart. */
  async refresh(overview) {
    this.overview = overview;
    const sinceS = this.readings.at(-1)?.at_s ?? Math.max(0, overview.now_s - SPANS.at(-1)[1]);
    const path = `/v1/pools/${encodeURIComponent(this.pool)}/demand`;
    const { readings } = await get(path, { query: { since_s: sinceS }, signal: this.signal });
    const last = this.readings.at(-1)?.at_s ?? -1;
    const latest = overview.pools.find((each) => each.name === this.pool).demand;
    if (!this.readings.length && !readings.length && latest) readings.push(latest); // it may be older than the period
    const known = [...this.readings, ...readings.filter((reading) => reading.at_s > last)];
    this.readings = known.filter((reading) => reading.at_s > overview.now_s - KEPT_S);
    this.#draw();
  }

  #draw() {
    if (!this.readings.length) {
      const how = `Report it with POST /v1/pools/${this.pool}/demand, or let the operator read it from Prometheus.`;
      put(this.body, empty("No demand reported yet", how));
      this.plot = null;
      return;
    }
    const pool = this.overview.pools.find((each) => each.name === this.pool);
    const levels = pool.forecast?.quantiles ?? [];
    const key = levels.join();
    if (!this.plot || key !== this.key) {
      this.key = key;
      this.plot = chart(this.body, spec(pool, levels), this.signal);
    }
    const columns = data(this.readings, pool, this.overview.now_s, this.spanS);
    this.plot.update(columns, columns[0].indexOf(this.overview.now_s));
  }

  #spans() {
    const choose = (event) => {
      this.spanS = Number(event.target.value);
      if (this.overview) this.#draw();
    };
    const options = SPANS.map(([name, value]) => el("option", { value, selected: value === this.spanS }, name));
    return el("label", { class: "row small" }, "Last", el("select", { on: { change: choose } }, options));
  }
}

/** Returns the chart's spec. The legend lists the forecast quantile that lending uses; others are in the table only. */
function spec(pool, levels) {
  const promised = promisedLevel(pool, levels);
  const forecasts = levels.map((level) => ({
    label: `${level === promised ? "Upper bound at" : "Forecast"} ${percent(level)}`,
    quiet: level !== promised,
    colour: "inference",
    width: 1,
    dash: [2, 3],
  }));
  const first = 3;
  const bands = levels.slice(1).map((_, at) => [first + at + 1, first + at, at ? "band-2" : "band-1"]);
  const series = [
    { label: "Demand", colour: "inference", stepped: true },
    { label: "Capacity", colour: "muted", dash: [6, 4], width: 1.5 },
    ...forecasts,
  ];
  return { label: `Demand and capacity of pool ${pool.name}`, unit: "GPUs", series, bands };
}

/** Returns the forecast quantile that lending of the pool uses. */
function promisedLevel(pool, levels) {
  return levels.find((level) => level >= pool.quantile) ?? levels.at(-1);
}

/** Renders the demand and compares the forecast peak within the horizon with the GPUs that are not lent. */
export function demandFigure(pool, { lent, recalled }, isOneOfMany) {
  const { demand, forecast } = pool;
  const name = isOneOfMany ? `Demand of ${pool.name}` : "Inference demand";
  const unit = `of ${gpus(pool.capacity_gpus)}`;
  if (!demand) return figureOf("inference", name, "–", unit, "no demand reported yet");
  const own = pool.capacity_gpus - lent - recalled;
  const [state, verdict] = safety(pool, own, recalled);
  const level = forecast && promisedLevel(pool, forecast.quantiles);
  const most = forecast && forecast.gpus[forecast.quantiles.indexOf(level)];
  const ahead = forecast
    ? `at most ${figure(most)} within ${duration(forecast.horizon_s)} (${percent(level)} quantile)`
    : "no forecast yet";
  const homing = recalled ? `, ${figure(recalled)} recalled` : "";
  const below = [el("strong", {}, verdict), ` ${ahead}, ${figure(own)} not lent${homing}${promise(pool.shortages)}`];
  return figureOf(state, name, figure(demand.gpus), unit, below);
}

/** Returns how often loans left the pool short in two weeks, and how much of its promise is left. */
function promise(shortages) {
  if (!shortages?.intervals || shortages.target === null) return "";
  const share = percent(shortages.short_intervals / shortages.intervals);
  return `; short ${share} of the time, ${percent(shortages.budget_left)} of the budget left`;
}

function safety(pool, own, recalled) {
  if (pool.demand.gpus > pool.capacity_gpus) return ["recalled", "Overloaded:"];
  if (pool.demand.gpus > own) return ["recalled", "Short:"];
  const most = pool.forecast?.gpus[pool.forecast.quantiles.indexOf(promisedLevel(pool, pool.forecast.quantiles))];
  return most > own + recalled ? ["lent", "Tight:"] : ["inference", "Safe:"];
}

/** Reduces readings to POINTS_MAX by keeping the largest of each interval, so that peaks remain visible. */
export function thinReadings(readings, spanS) {
  if (readings.length <= POINTS_MAX) return readings;
  const largest = new Map();
  for (const reading of readings) {
    const crowd = Math.floor((reading.at_s * POINTS_MAX) / spanS);
    if (reading.gpus >= (largest.get(crowd)?.gpus ?? 0)) largest.set(crowd, reading);
  }
  return [...largest.values()];
}

/** Returns the chart's columns: past demand, capacity, and quantiles from the forecast's start to its horizon. */
function data(readings, pool, nowS, spanS) {
  const fromS = nowS - spanS;
  const at = Math.max(0, readings.findIndex((reading) => reading.at_s >= fromS) - 1);
  const recent = readings.at(-1).at_s < fromS ? readings.slice(-1) : readings.slice(at);
  const rows = thinReadings(recent, spanS).map((reading) => [Math.max(reading.at_s, fromS), reading.gpus, null]);
  const { forecast } = pool;
  rows.push([nowS, readings.at(-1).gpus, forecast?.gpus]);
  if (forecast) {
    const begins = Math.max(forecast.made_at_s, fromS);
    if (begins < nowS) rows.push([begins, null, forecast.gpus]);
    rows.push([begins + forecast.horizon_s, null, forecast.gpus]);
  }
  rows.sort((a, b) => a[0] - b[0]);
  let demand = null;
  for (const row of rows) {
    if (row[1] === null && row[0] <= nowS) row[1] = demand;
    demand = row[1] ?? demand;
  }
  const levels = forecast?.quantiles ?? [];
  return [
    rows.map((row) => row[0]),
    rows.map((row) => row[1]),
    rows.map(() => pool.capacity_gpus),
    ...levels.map((_, level) => rows.map((row) => row[2]?.[level] ?? null)),
  ];
}
