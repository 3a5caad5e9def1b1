// API client: requests and errors.

import { requireSession, sessionHeaders, sessionKey } from "./session.js";

const READ_TIMEOUT_MS = 60_000; // only for GET: pages poll, so a read must not hang

/** An error response of the API (RFC 9457). `errors` lists the invalid fields. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the service responded with status ${status}`);
    this.status = status;
    this.title = body.title || `Status ${status}`;
    this.slug = String(body.type || "").split(":").at(-1);
    this.errors = body.errors || [];
  }
}

/** The service is unreachable. */
export class Unreachable extends Error {}

/**
 * Reads a resource. The type of the response follows from a constant path; others give `any`.
 * @template {string} P
 * @param {P} path
 * @param {RequestOptions} [options]
 * @returns {Promise<import("../types/responses").ResponseOf<P>>}
 */
export const get = (path, options) => ask("GET", path, options);
export const post = (path, body, options) => ask("POST", path, { ...options, body });

/** Returns a page of events after the number `after`, or from the oldest event if retention has deleted that one. */
export async function eventsAfter(after, { path, limit, signal }) {
  try {
    return await get(path, { query: { after, limit }, signal });
  } catch (error) {
    if (!(error instanceof Problem && error.slug === "swept")) throw error;
    return get(path, { query: { limit }, signal });
  }
}

/**
 * Options of a request. `limitMs`: the longest wait for the start of a response.
 * @typedef {{body?: unknown, query?: Query, signal?: AbortSignal, headers?: Record<string, string>, limitMs?: number}}
 * RequestOptions
 * @typedef {Record<string, string | number | boolean | null | undefined>} Query
 */

/**
 * Sends a request and returns the response as JSON. A 401 prompts for a sign-in and repeats the request.
 * @param {string} method
 * @param {string} path
 * @param {RequestOptions} [options]
 */
export async function ask(method, path, { body, query, signal, headers } = {}) {
  const limitMs = method === "GET" ? READ_TIMEOUT_MS : Infinity;
  const answer = await withSession(() => raw(method, address(path, query), { body, signal, headers, limitMs }));
  const text = await answer.text();
  const result = text ? parsed(text) : {};
  if (!answer.ok) throw new Problem(answer.status, result);
  return result;
}

/**
 * Like `fetch`, with the session. Throws Unreachable if no response starts within `limitMs` milliseconds.
 * @param {string} method
 * @param {string} url
 * @param {RequestOptions} [options]
 */
export async function raw(method, url, { body, signal, headers = {}, limitMs = Infinity } = {}) {
  const sent = { Accept: "application/json", ...sessionHeaders(), ...headers };
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const text = body === undefined ? undefined : JSON.stringify(body);
  const silence = new AbortController();
  const watchdog = limitMs < Infinity && setTimeout(() => silence.abort(), limitMs);
  const either = AbortSignal.any([silence.signal, signal].filter(Boolean));
  try {
    return await fetch(url, { method, headers: sent, signal: either, body: text, cache: "no-store" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError" && !silence.signal.aborted) throw error;
    throw new Unreachable("the service does not respond");
  } finally {
    clearTimeout(watchdog);
  }
}

/** Repeats `attempt` until it has a valid session. */
export async function withSession(attempt) {
  for (;;) {
    const key = sessionKey();
    const answer = await attempt();
    if (answer.status !== 401) return answer;
    const why = parsed(await answer.text()).detail;
    if (sessionKey() === key) await requireSession(key ? `Sign in again: ${why}.` : "");
  }
}

/**
 * @param {string} path
 * @param {Query} [query] empty values are omitted
 */
function address(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return { detail: text.slice(0, 300) };
  }
}
