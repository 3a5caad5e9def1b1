// Requests whose body is plain bytes instead of JSON.

import { Problem, Unreachable, withSession } from "./api.js";
import { sessionHeaders } from "./session.js";

/** Sends the text as the bytes of the body and returns the response. */
export async function putBytes(path, text) {
  const headers = { ...sessionHeaders(), "Content-Type": "application/octet-stream" };
  const send = () => fetch(path, { method: "PUT", headers, body: text, cache: "no-store" }).catch(() => {
    throw new Unreachable("the service does not respond");
  });
  const answer = await withSession(send);
  const result = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Problem(answer.status, result);
  return result;
}
