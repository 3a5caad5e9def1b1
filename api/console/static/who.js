// Who asks, and what they may do: levers that the service would refuse are told before they are pulled.

import { get, token } from "./api.js";

const ROLES = ["viewer", "submitter", "queue-admin", "admin"];
let known = null;

/** {name, grants}, asked for once with each token. */
export async function whoAmI() {
  if (known?.token !== token()) {
    const who = await get("/v1/whoami");
    known = { ...who, token: token() };
  }
  return known;
}

/** Whether `who` has `role` on `queue`; on everything where `queue` is empty. */
export function may(who, role, queue = "") {
  return who.grants.some((grant) => {
    const [has, on = ""] = grant.split(":");
    return ROLES.indexOf(has) >= ROLES.indexOf(role) && (on === "" || on === queue);
  });
}

/** Why `who` may not change lending; empty where they may. */
export function noLending(who) {
  return may(who, "admin") ? "" : `This needs the role admin; ${is(who)}.`;
}

/** Why `who` may not change this job; empty where they may: submitters change their own, queue-admins all. */
export function noChange(who, job) {
  if (may(who, "queue-admin", job.queue)) return "";
  if (job.owner === who.name && may(who, "submitter", job.queue)) return "";
  return `This needs the role queue-admin on queue ${job.queue}, or to be ${job.owner || "its owner"}; ${is(who)}.`;
}

function is(who) {
  return `you are ${who.name} with ${who.grants.join(", ") || "no role"}`;
}
