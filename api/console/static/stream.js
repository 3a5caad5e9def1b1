// Server-sent events over fetch, because EventSource cannot send headers. Reconnects and resumes after the last event.

import { withSession, raw } from "./api.js";

const SILENCE_MS = 45_000; // the service sends a heartbeat every 15 s
const FINAL = new Set([403, 404, 501]); // a retry cannot succeed
const RETRY_MS = [500, 1000, 2000, 4000];

/**
 * Follows a stream until `signal` aborts or the service sends an "end" event. Calls `heard` for each event, and `state`
 * when the connection changes.
 * @typedef {{id: string, type: string, data: any}} StreamEvent
 * @param {string} url
 * @param {{heard: (event: StreamEvent) => void, state?: (is: "live" | "lost") => void, signal: AbortSignal}} options
 */
export async function follow(url, { heard, state = (_) => {}, signal }) {
  let lastId = "";
  for (let failures = 0; !signal.aborted; ) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    try {
      const headers = { Accept: "text/event-stream", ...(lastId && { "Last-Event-ID": lastId }) };
      const limits = { signal: attempt.signal, limitMs: SILENCE_MS };
      const answer = await withSession(() => raw("GET", url, { headers, ...limits }));
      if (answer.status === 422) lastId = ""; // retention has deleted that event
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
      if (attempt.signal.aborted) failures = Math.max(1, failures); // report a silent connection at once
    } finally {
      signal.removeEventListener("abort", stop);
    }
    if (signal.aborted) return;
    if (failures > 0) state("lost");
    await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
    failures += 1;
  }
}

/** Reads frames until the stream ends. Returns true if `take` returned true for the last frame. */
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

/** Parses one frame. Returns null for a frame without data. */
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

/** @returns {Promise<void>} */
function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
