// The API: one way to ask, problems as errors, and who asks.

import { askToken } from "./dialogs.js";

const KEY = "ebbtide.token";
const ANSWER_MS = 60_000; // of what is only read: who asks again and again must not wait for ever
let asking = null;

/** What the API refuses: RFC 9457, with the refused fields in `errors`. */
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `the service answered ${status}`);
    this.status = status;
    this.title = body.title || `Answer ${status}`;
    this.slug = String(body.type || "").split(":").at(-1);
    this.errors = body.errors || [];
  }
}

/** Nobody answers. */
export class Unreachable extends Error {}

export const get = (path, options) => ask("GET", path, options);
export const post = (path, body, options) => ask("POST", path, { ...options, body });

/** A page of events after the number `after`, or of all that are kept where that one is kept no more. */
export async function eventsAfter(after, { path, limit, signal }) {
  try {
    return await get(path, { query: { after, limit }, signal });
  } catch (error) {
    if (error.slug !== "swept") throw error;
    return get(path, { query: { limit }, signal });
  }
}

/** The answer as JSON. A 401 asks the person for a token, and then asks the service again. */
export async function ask(method, path, { body, query, signal, headers } = {}) {
  const limitMs = method === "GET" ? ANSWER_MS : Infinity;
  const answer = await admitted(() => raw(method, address(path, query), { body, signal, headers, limitMs }));
  const text = await answer.text();
  const told = text ? parsed(text) : {};
  if (!answer.ok) throw new Problem(answer.status, told);
  return told;
}

/** As `fetch`, with the token. Raises Unreachable where nobody answers, or begins to within `limitMs`. */
export async function raw(method, url, { body, signal, headers = {}, limitMs = Infinity } = {}) {
  const sent = { Accept: "application/json", ...headers };
  if (token()) sent.Authorization = `Bearer ${token()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const text = body === undefined ? undefined : JSON.stringify(body);
  const silence = new AbortController();
  const watchdog = limitMs < Infinity && setTimeout(() => silence.abort(), limitMs);
  const either = AbortSignal.any([silence.signal, signal].filter(Boolean));
  try {
    return await fetch(url, { method, headers: sent, signal: either, body: text, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError" && !silence.signal.aborted) throw error;
    throw new Unreachable("the service does not answer");
  } finally {
    clearTimeout(watchdog);
  }
}

/** Repeats `attempt` with a new token for as long as the service does not take the one that it was given. */
export async function admitted(attempt) {
  for (;;) {
    const answer = await attempt();
    if (answer.status !== 401) return answer;
    await newToken(parsed(await answer.text()).detail);
  }
}

/** The token that this tab asks with; null without one. */
export function token() {
  return sessionStorage.getItem(KEY);
}

/** Everybody who was refused at once waits for the same dialog. */
function newToken(why) {
  asking ??= askToken(token() ? `This token is not accepted: ${why}` : "").then((given) => {
    sessionStorage.setItem(KEY, given);
    asking = null;
  });
  return asking;
}

function address(path, query = {}) {
  const told = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(told).toString();
  return text ? `${path}?${text}` : path;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return { detail: text.slice(0, 300) };
  }
}
