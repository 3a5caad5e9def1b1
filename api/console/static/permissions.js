// The user's name and permissions, so that actions without permission are disabled with a reason.

import { get } from "./api.js";
import { sessionKey } from "./session.js";

const ROLES = ["viewer", "submitter", "queue-admin", "admin"];
let known;

/** Returns {name, grants}. Requested once per session. */
export async function whoAmI() {
  if (known?.key !== sessionKey()) {
    const who = await get("/v1/whoami");
    known = { ...who, key: sessionKey() };
  }
  return known;
}

/** Returns whether `who` has `role` on `queue`, or on everything if `queue` is empty. */
export function may(who, role, queue = "") {
  return who.grants.some((grant) => {
    const [has, on = ""] = grant.split(":");
    return ROLES.indexOf(has) >= ROLES.indexOf(role) && (on === "" || on === queue);
  });
}

/** Returns whether `who` has `role` on at least one queue. */
export function mayAnywhere(who, role) {
  return who.grants.some((grant) => ROLES.indexOf(grant.split(":")[0]) >= ROLES.indexOf(role));
}

/** Returns why `who` may not change lending, or "". */
export function noLending(who) {
  return lacksRole(who, "admin");
}

/** Returns why `who` may not do what needs `role`, on `queue` if it is given, or "". */
export function lacksRole(who, role, queue = "") {
  if (may(who, role, queue)) return "";
  return `Requires the role ${role}${queue ? ` on queue ${queue}` : ""}; ${is(who)}.`;
}

/** Returns why `who` may not change this job, or "". Submitters may change their own jobs, queue-admins all. */
export function noChange(who, job) {
  if (may(who, "queue-admin", job.queue)) return "";
  if (job.owner_id === who.owner_id && may(who, "submitter", job.queue)) return "";
  return `Only ${job.owner || "its owner"} or a queue-admin of queue ${job.queue} may do this; ${is(who)}.`;
}

function is(who) {
  return `you are ${who.name} (${who.grants.join(", ") || "no role"})`;
}
