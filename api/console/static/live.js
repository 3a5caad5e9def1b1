// One stream of events for the whole console, and pages that keep themselves up to date by it.

import { follow } from "./stream.js";
import { Unreachable } from "./api.js";
import { say } from "./dom.js";

const REST_MS = 40; // between two looks, however fast events come: the first is looked after at once
const WORDS = { live: "Live", lost: "Connection lost, trying again" };
const listeners = new Set();
let connection = "";

/** Starts the stream; its state is told in `place`. */
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

/** Each event, until `signal` aborts; null says that some may have been missed. */
export function onEvent(listen, signal) {
  listeners.add(listen);
  signal.addEventListener("abort", () => listeners.delete(listen));
}

/**
 * Calls `refresh` now, after events that `wants` takes, and every `everyS`; never twice at once. What it throws goes to
 * `failed`, once for as long as it stays the same, and null once it goes well again; but not that a service does not
 * answer, once there was something to see: of that the connection tells.
 */
export function keepUp(refresh, { signal, everyS = 5, wants = () => true, failed }) {
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
      timer = setTimeout(run, Math.max(0, restedAt - performance.now())); // after all that came with this event
    }
  }, signal);
  document.addEventListener("visibilitychange", () => !document.hidden && run(), { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  run();
  return run;
}
