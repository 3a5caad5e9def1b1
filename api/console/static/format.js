// Formats numbers, times and sizes.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
/** @type {[string, number][]} */
const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
const DAY_S = 86400;

export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  return Math.abs(value) >= 1000 ? whole.format(value) : fine.format(value);
}

export function gpus(value) {
  return withUnit(count(value), "GPUs", value);
}

/** Appends the unit, which may be empty. Uses the singular for one GPU. */
export function withUnit(text, unit, value) {
  const name = unit === "GPUs" && value === 1 ? "GPU" : unit;
  return name ? `${text} ${name}` : text;
}

/** Formats a range: 4, or 1–4. */
export function range(least, most, to = "–") {
  return least === most ? count(least) : `${count(least)}${to}${count(most)}`;
}

/** Formats GPU time: 12 minutes on one GPU are 12 GPU-minutes. */
export function gpuTime(seconds) {
  if (seconds < 60) return `${figure(seconds)} GPU-seconds`;
  return seconds < 3600 ? `${figure(seconds / 60)} GPU-minutes` : `${figure(seconds / 3600)} GPU-hours`;
}

/**
 * Formats an amount of money, with cents below 100.
 * @param {number} value
 * @param {string} currency code of ISO 4217
 */
export function money(value, currency) {
  const digits = Math.abs(value) < 100 ? 2 : 0;
  const options = { style: "currency", currency, minimumFractionDigits: digits, maximumFractionDigits: digits };
  return new Intl.NumberFormat("en", /** @type {any} */ (options)).format(value);
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const format = share > 0.99 && share < 1 ? exact : share > 0 && share < 0.1 ? fine : whole;
  return `${format.format(100 * share)}%`;
}

/** Formats a duration with at most two units: 3 d 4 h, 12 min, 1.25 s, 320 ms. Below a microsecond it is 0 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 1e-6) return "0 s";
  if (seconds < 0.9995) return `${fine.format(1000 * seconds)} ms`;
  if (seconds < 10) return `${fine.format(seconds)} s`;
  const rounded = Math.round(seconds);
  const at = UNITS.findIndex(([, size]) => rounded >= size);
  const [unit, size] = UNITS[at];
  const first = Math.floor(rounded / size);
  const [below, part] = UNITS[at + 1] ?? ["", 1];
  const second = at + 1 < UNITS.length ? Math.floor((rounded - first * size) / part) : 0;
  return second ? `${first} ${unit} ${second} ${below}` : `${first} ${unit}`;
}

/** Formats the time of day; adds the date if it is not today. */
export function time(atS, nowS = Date.now() / 1000, today = clock) {
  const at = new Date(1000 * atS);
  const isToday = at.toDateString() === new Date(1000 * nowS).toDateString() && Math.abs(nowS - atS) < DAY_S;
  return isToday ? today.format(at) : day.format(at);
}

export function timeToMinute(atS) {
  return time(atS, Date.now() / 1000, minute);
}

/** Formats the time in UTC: 2026-11-22 21:49:12 UTC. */
export function utc(atS) {
  return `${new Date(1000 * atS).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** Formats axis ticks: with seconds if they are less than a minute apart, with a date at the start of a day. */
export function tickTimes(ticks) {
  const usual = ticks.length > 1 && ticks[1] - ticks[0] < 60 ? clock : minute;
  return ticks.map((tick, at) => {
    const isNewDay = at > 0 && new Date(1000 * tick).toDateString() !== new Date(1000 * ticks[at - 1]).toDateString();
    return (isNewDay ? day : usual).format(new Date(1000 * tick));
  });
}

/** Formats an event or reason code: "JobGrown" becomes "Grown". */
export function words(code) {
  const text = code.replace(/^Job(?=[A-Z])/, "").replace(/([a-z])([A-Z])/g, "$1 $2");
  return text[0] + text.slice(1).toLowerCase().replace(/\bgpus?\b/, (gpu) => (gpu === "gpu" ? "GPU" : "GPUs"));
}

export function arrows(message) {
  return message.replaceAll("->", "→");
}

export function ago(atS, nowS) {
  const past = nowS - atS;
  if (Math.abs(past) < 1) return "now";
  return past > 0 ? `${duration(Math.round(past))} ago` : `in ${duration(Math.round(-past))}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1024) return `${whole.format(value)} B`;
  const names = ["KiB", "MiB", "GiB", "TiB", "PiB"];
  const at = Math.min(names.length, Math.floor(Math.log(value) / Math.log(1024)));
  return `${fine.format(value / 1024 ** at)} ${names[at - 1]}`;
}
