// The session of this browser: sign-in, sign-out, and tabs that follow each other.
//
// The session is an HttpOnly cookie plus a key, which the page keeps here and sends as a header. Neither works alone.

import { askSignIn, confirm, toast } from "./dialogs.js";

const KEY = "ebbtide.session-key"; // localStorage: tabs share the session
const RETURN = "ebbtide.return"; // sessionStorage: where this tab was when it left for the issuer
const KEY_HEADER = "X-Ebbtide-Session-Key";
const OIDC_URL = "/sign-in/oidc";
const PROBLEMS = {
  denied: "The identity provider did not sign you in.",
  expired: "The sign-in took too long, or began in another browser. Try again.",
  failed: "The identity provider's answer is not valid. The log of the service says why.",
  unavailable: "The identity provider does not answer. Try again later, or use a token.",
};
const listeners = new Set();
let asking = null;

/** Returns the headers that authenticate a request of this page. */
export function sessionHeaders() {
  return sessionKey() ? { [KEY_HEADER]: sessionKey() } : {};
}

/** Returns the key of the session, or null. It changes with each sign-in. */
export function sessionKey() {
  return localStorage.getItem(KEY);
}

/** Prompts until the user is signed in, here or in another tab. Requests that fail together share one dialog. */
export function requireSession(why) {
  asking ??= prompt(why)
    .then(() => listeners.forEach((listen) => listen()))
    .finally(() => (asking = null));
  return asking;
}

/** Signs in if the page was opened with a login URL, and removes the login from the address and the history. */
export async function enter() {
  const [path, search = ""] = location.hash.slice(1).split("?");
  if (path !== "/login") return;
  const began = sessionStorage.getItem(RETURN); // the sign-in began in this tab
  sessionStorage.removeItem(RETURN);
  history.replaceState(null, "", began || "#/");
  const { code, problem } = Object.fromEntries(new URLSearchParams(search));
  if (code && (began || (await mayReplaceSession()))) await refuseOrAccept(await signIn({ code }));
  else if (problem) await requireSession(PROBLEMS[problem] || PROBLEMS.failed);
}

/** Calls `listen` after each prompt that ended with a sign-in. */
export function onSession(listen) {
  listeners.add(listen);
}

/** Ends the session in the service and in every tab. */
export async function signOut() {
  const answer = await fetch("/sign-out", { method: "POST", headers: sessionHeaders() }).catch(() => null);
  if (!answer?.ok) {
    toast("The service does not answer, so you are still signed in. Try again.");
    return;
  }
  localStorage.removeItem(KEY);
  location.reload();
}

/** Reloads this tab when another one signs in or out, unless it waits for a sign-in. */
export function followOtherTabs() {
  addEventListener("storage", (event) => {
    if ((event.key === KEY || event.key === null) && !asking) location.reload();
  });
}

async function refuseOrAccept(refusal) {
  if (refusal) await requireSession(refusal);
}

/** Asks before a link replaces a session: an attacker could make the user work under another name. */
async function mayReplaceSession() {
  if (!sessionKey()) return true;
  const answer = await fetch("/v1/whoami", { headers: sessionHeaders(), cache: "no-store" });
  if (!answer.ok) return true;
  const { name } = await answer.json();
  const text = `This browser is signed in as ${name}. The URL signs it in again, perhaps as another user.`;
  return confirm("Sign in again?", [text], { action: "Sign in again" });
}

async function prompt(why) {
  const { methods, issuer } = await (await fetch("/sign-in", { cache: "no-store" })).json();
  for (let refusal = why; ; ) {
    const elsewhere = new AbortController();
    const notice = (event) => event.key === KEY && event.newValue && elsewhere.abort();
    addEventListener("storage", notice, { signal: elsewhere.signal });
    const token = await askSignIn(refusal, {
      issuer: methods.includes("oidc") ? issuer : "",
      signal: elsewhere.signal,
    });
    if (elsewhere.signal.aborted) return;
    elsewhere.abort();
    if (token === null) await leaveForIssuer();
    refusal = await signIn({ token });
    if (!refusal) return;
  }
}

/** Goes to the issuer, which returns to the page of the service. The promise never settles. */
function leaveForIssuer() {
  sessionStorage.setItem(RETURN, location.hash || "#/");
  location.assign(OIDC_URL);
  return new Promise(() => {});
}

/** Opens a session. Returns why the service refuses it, or "". */
async function signIn(credential) {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch("/sign-in", { method: "POST", headers, body: JSON.stringify(credential) });
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) return asSentence(content.detail || `the service responded with status ${answer.status}`);
  localStorage.setItem(KEY, content.key);
  return "";
}

function asSentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
}
