// Server-sent events over fetch, because EventSource cannot send a token. It comes back by itself, where it left off.

import { admitted, raw } from "./api.js";

const SILENCE_MS = 45_000; // the service says something every 15 s
const FINAL = new Set([403, 404, 501]); // asking again would not help
const RETRY_MS = [500, 1000, 2000, 4000];

/**
 * Follows a stream until `signal` aborts, or the service ends it with an event "end".
 * `heard(event)` gets {id, type, data}, `state("live" | "lost")` how the connection fares.
 */
export async function follow(url, { heard, state = () => {}, signal }) {
  let lastId = "";
  for (let failures = 0; !signal.aborted; ) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    try {
      const headers = { Accept: "text/event-stream", ...(lastId && { "Last-Event-ID": lastId }) };
      const limits = { signal: attempt.signal, limitMs: SILENCE_MS };
      const answer = await admitted(() => raw("GET", url, { headers, ...limits }));
      if (answer.status === 422) lastId = ""; // the service has forgotten that event
      if (answer.ok) {
        failures = 0;
        state("live");
        const end = await read(answer.body, attempt, (event) => {
          lastId = event.id || lastId;
          if (event.type !== "end") heard(event);
          return event.type === "end";
        });
        if (end) return;
      } else if (FINAL.has(answer.status)) return;
    } catch {
      if (attempt.signal.aborted) failures = Math.max(1, failures); // the silence was long enough to be told at once
    } finally {
      signal.removeEventListener("abort", stop);
    }
    if (signal.aborted) return;
    if (failures > 0) state("lost");
    await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
    failures += 1;
  }
}

/** Reads frames until the stream ends; true where `take` says that this was the last. */
async function read(body, attempt, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const watchdog = setTimeout(() => attempt.abort(), SILENCE_MS);
    const { value, done } = await reader.read().finally(() => clearTimeout(watchdog));
    if (done) return false;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const event of frames.map(parsed)) {
      if (event && take(event)) return true;
    }
  }
}

/** One frame; null for a comment or a mere `retry`. */
function parsed(frame) {
  const event = { id: "", type: "message", data: "" };
  for (const line of frame.split("\n")) {
    const [, name, value] = /^([a-z]*): ?(.*)$/.exec(line) || [];
    if (name === "id") event.id = value;
    if (name === "event") event.type = value;
    if (name === "data") event.data += value;
  }
  return event.data ? { ...event, data: JSON.parse(event.data) } : null;
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
