// Demand of an inference pool against its capacity, with what the forecast expects next.

import { get } from "../api.js";
import { card, el, empty, figureOf, put } from "../dom.js";
import { duration, figure, gpus, percent } from "../format.js";
import { chart } from "../plotting.js";

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

  /** Reads what came since the last look, and draws. */
  async refresh(told) {
    this.told = told;
    const sinceS = this.readings.at(-1)?.at_s ?? Math.max(0, told.now_s - SPANS.at(-1)[1]);
    const path = `/v1/pools/${encodeURIComponent(this.pool)}/demand`;
    const { readings } = await get(path, { query: { since_s: sinceS }, signal: this.signal });
    const last = this.readings.at(-1)?.at_s ?? -1;
    const latest = told.pools.find((each) => each.name === this.pool).demand;
    if (!this.readings.length && !readings.length && latest) readings.push(latest); // it may be older than what is kept
    const known = [...this.readings, ...readings.filter((reading) => reading.at_s > last)];
    this.readings = known.filter((reading) => reading.at_s > told.now_s - KEPT_S);
    this.#draw();
  }

  #draw() {
    if (!this.readings.length) {
      const how = `Report it with POST /v1/pools/${this.pool}/demand, or let the operator read it from Prometheus.`;
      put(this.body, empty("Nobody has told the demand yet", how));
      this.plot = null;
      return;
    }
    const pool = this.told.pools.find((each) => each.name === this.pool);
    const levels = pool.forecast?.quantiles ?? [];
    const key = levels.join();
    if (!this.plot || key !== this.key) {
      this.key = key;
      this.plot = chart(this.body, spec(pool, levels), this.signal);
    }
    const columns = data(this.readings, pool, this.told.now_s, this.spanS);
    this.plot.update(columns, columns[0].indexOf(this.told.now_s));
  }

  #spans() {
    const choose = (event) => {
      this.spanS = Number(event.target.value);
      if (this.told) this.#draw();
    };
    const options = SPANS.map(([name, value]) => el("option", { value, selected: value === this.spanS }, name));
    return el("label", { class: "row small" }, "Last", el("select", { on: { change: choose } }, options));
  }
}

/** Beside the demand, the forecast that the pool lends by is told; the others stand in the table. */
function spec(pool, levels) {
  const promised = promisedLevel(pool, levels);
  const forecasts = levels.map((level) => ({
    label: `${level === promised ? "At most, with" : "Forecast"} ${percent(level)}`,
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

/** The quantile of the forecast that the pool's lending goes by. */
function promisedLevel(pool, levels) {
  return levels.find((level) => level >= pool.quantile) ?? levels.at(-1);
}

/** Demand, and whether inference is safe: what may be needed within the horizon, against what is not lent by then. */
export function demandFigure(pool, { lent, recalled }, isOneOfMany) {
  const { demand, forecast } = pool;
  const name = isOneOfMany ? `Demand of ${pool.name}` : "Inference demand";
  const unit = `of ${gpus(pool.capacity_gpus)}`;
  if (!demand) return figureOf("inference", name, "–", unit, "nothing told yet");
  const own = pool.capacity_gpus - lent - recalled;
  const [state, verdict] = safety(pool, own, recalled);
  const level = forecast && promisedLevel(pool, forecast.quantiles);
  const most = forecast && forecast.gpus[forecast.quantiles.indexOf(level)];
  const ahead = forecast
    ? `at most ${figure(most)} within ${duration(forecast.horizon_s)} (${percent(level)} sure)`
    : "no forecast yet";
  const homing = recalled ? `, ${figure(recalled)} on the way home` : "";
  const below = [el("strong", {}, verdict), ` ${ahead}, ${figure(own)} not lent${homing}`];
  return figureOf(state, name, figure(demand.gpus), unit, below);
}

function safety(pool, own, recalled) {
  if (pool.demand.gpus > pool.capacity_gpus) return ["recalled", "Overloaded:"];
  if (pool.demand.gpus > own) return ["recalled", "Short:"];
  const most = pool.forecast?.gpus[pool.forecast.quantiles.indexOf(promisedLevel(pool, pool.forecast.quantiles))];
  return most > own + recalled ? ["lent", "Tight:"] : ["inference", "Safe:"];
}

/** As many readings as can be drawn: the largest of each short time, so that no peak is passed over. */
export function thinned(readings, spanS) {
  if (readings.length <= POINTS_MAX) return readings;
  const largest = new Map();
  for (const reading of readings) {
    const crowd = Math.floor((reading.at_s * POINTS_MAX) / spanS);
    if (reading.gpus >= (largest.get(crowd)?.gpus ?? 0)) largest.set(crowd, reading);
  }
  return [...largest.values()];
}

/** Columns for the chart: past demand, capacity throughout, the quantiles from the forecast's making to its horizon. */
function data(readings, pool, nowS, spanS) {
  const fromS = nowS - spanS;
  const at = Math.max(0, readings.findIndex((reading) => reading.at_s >= fromS) - 1);
  const recent = readings.at(-1).at_s < fromS ? readings.slice(-1) : readings.slice(at);
  const rows = thinned(recent, spanS).map((reading) => [Math.max(reading.at_s, fromS), reading.gpus, null]);
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
