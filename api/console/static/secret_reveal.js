// A secret that is shown once.

import { confirm } from "./dialogs.js";
import { copyButton, el } from "./dom.js";

/** Shows a new secret with a copy button until the user confirms that it is stored. */
export async function revealOnce(title, name, secret) {
  const shown = el("div", { class: "secret-value" }, el("code", {}, secret), copyButton(name, secret));
  const what = [`Store the ${name} now: it is not shown again.`, shown];
  await confirm(title, what, { action: "I have stored it", isNotice: true });
}
