// The console's single event stream, and pages that refresh on its events.

import { follow } from "./stream.js";
import { Unreachable } from "./api.js";
import { say } from "./dom.js";

const REST_MS = 40; // minimum time between refreshes; the first event triggers one at once
const WORDS = { live: "Live", lost: "Connection lost, reconnecting" };
const listeners = new Set();
let connection = "";

/** Starts the stream and shows its state in `place`. */
export function startLive(place) {
  const state = (is) => {
    const isBack = connection === "lost" && is === "live";
    connection = is;
    place.dataset.is = is;
    say(place, WORDS[is]);
    if (isBack) listeners.forEach((listen) => listen(null));
  };
  const heard = (event) => listeners.forEach((listen) => listen(event.data));
  follow("/v1/events", { heard, state, signal: new AbortController().signal });
}

/** Calls `listen(event)` for each event until `signal` aborts; null means that events may have been missed. */
export function onEvent(listen, signal) {
  listeners.add(listen);
  signal.addEventListener("abort", () => listeners.delete(listen));
}

/**
 * Calls `refresh` now, after events that `wants` accepts, and every `everyS` seconds; never concurrently. Passes each
 * new error to `failed`, and null when `refresh` succeeds again. An unreachable service is not reported once the page
 * has content: the connection status shows it. Returns a function that refreshes now.
 * @param {() => Promise<unknown>} refresh
 * @typedef {{signal: AbortSignal, everyS?: number, wants?: (event: any) => boolean,
 * failed: (error: any) => void}} Upkeep
 * @param {Upkeep} options
 */
export function keepUp(refresh, { signal, everyS = 5, wants = (_) => true, failed }) {
  let isRunning = false;
  let isStale = false;
  let timer = 0;
  let restedAt = 0;
  let hasShown = false;
  let failure = "";
  const run = async () => {
    clearTimeout(timer);
    if (isRunning) {
      isStale = true;
      return;
    }
    isRunning = true;
    isStale = false;
    try {
      if (!document.hidden || !hasShown) await refresh();
      if (failure) failed(null);
      hasShown = true;
      failure = "";
    } catch (error) {
      const isNew = String(error) !== failure && !(error instanceof Unreachable && hasShown);
      if (isNew && !signal.aborted) {
        failure = String(error);
        failed(error);
      }
    }
    isRunning = false;
    restedAt = performance.now() + REST_MS;
    if (!signal.aborted) timer = setTimeout(run, isStale ? REST_MS : 1000 * everyS);
  };
  onEvent((event) => {
    if (event !== null && !wants(event)) return;
    if (isRunning) isStale = true;
    else {
      clearTimeout(timer);
      timer = setTimeout(run, Math.max(0, restedAt - performance.now())); // batches events that arrive together
    }
  }, signal);
  document.addEventListener("visibilitychange", () => !document.hidden && run(), { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  run();
  return run;
}
