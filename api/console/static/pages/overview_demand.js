// Figure of the demand of an inference pool, and whether its own nodes cover the forecast.

import { el, figureOf } from "../dom.js";
import { duration, figure, gpus, percent } from "../format.js";

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

/** Returns how often loans left the pool short in four weeks, and how much of its promise is left. */
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
