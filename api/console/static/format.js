// Numbers, times and sizes as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
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

/** A figure with its unit, which may be empty; one GPU is a GPU. */
export function withUnit(told, unit, value) {
  const name = unit === "GPUs" && value === 1 ? "GPU" : unit;
  return name ? `${told} ${name}` : told;
}

/** 4, or 1 to 4. */
export function range(least, most, to = "–") {
  return least === most ? count(least) : `${count(least)}${to}${count(most)}`;
}

/** GPU time: 12 min of one GPU is 12 GPU min. */
export function gpuTime(seconds) {
  if (seconds < 60) return `${figure(seconds)} GPU seconds`;
  return seconds < 3600 ? `${figure(seconds / 60)} GPU minutes` : `${figure(seconds / 3600)} GPU hours`;
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const format = share > 0.99 && share < 1 ? exact : share > 0 && share < 0.1 ? fine : whole;
  return `${format.format(100 * share)}%`;
}

/** Two units at the most: 3 d 4 h, 12 min, 1.25 s, 320 ms. What is less than a microsecond is nothing. */
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

/** A time of day; with the date where it is another day. */
export function time(atS, nowS = Date.now() / 1000, today = clock) {
  const at = new Date(1000 * atS);
  const isToday = at.toDateString() === new Date(1000 * nowS).toDateString() && Math.abs(nowS - atS) < DAY_S;
  return isToday ? today.format(at) : day.format(at);
}

export function timeToMinute(atS) {
  return time(atS, Date.now() / 1000, minute);
}

/** The exact time, the same for everybody: 2026-11-22 21:49:12 UTC. */
export function utc(atS) {
  return `${new Date(1000 * atS).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** The times below an axis: with seconds where they lie closer than a minute, with a date where a day begins. */
export function tickTimes(ticks) {
  const usual = ticks.length > 1 && ticks[1] - ticks[0] < 60 ? clock : minute;
  return ticks.map((tick, at) => {
    const isNewDay = at > 0 && new Date(1000 * tick).toDateString() !== new Date(1000 * ticks[at - 1]).toDateString();
    return (isNewDay ? day : usual).format(new Date(1000 * tick));
  });
}

/** Event codes and messages of the record as people write them. */
export function words(code) {
  const told = code.replace(/^Job(?=[A-Z])/, "").replace(/([a-z])([A-Z])/g, "$1 $2");
  return told[0] + told.slice(1).toLowerCase().replace(/\bgpus?\b/, (gpu) => (gpu === "gpu" ? "GPU" : "GPUs"));
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
