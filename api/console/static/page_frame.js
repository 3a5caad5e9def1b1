// The frame of a page: heading, levers, a place for errors, and sections that redraw only when their data change.

import { actionButton } from "./actions.js";
import { Problem } from "./api.js";
import { problemNote } from "./dialogs.js";
import { card, el, put, redraw, say } from "./dom.js";

/**
 * The frame of a page.
 *
 * `levers` holds the action buttons, `refused` the errors of actions and requests, `body` the content.
 */
export class PageFrame {
  /**
   * @param {HTMLElement} root
   * @param {string} heading
   * @param {{back?: {href: string, name: string}}} [options] `back`: the list that the page belongs to
   */
  constructor(root, heading, { back } = {}) {
    this.summary = el("p", { class: "muted" });
    this.levers = el("div", { class: "row" });
    this.refused = el("div");
    this.body = el("div", { class: "stack" }, el("p", { class: "loading" }, "Loading …"));
    this.hasContent = false;
    this.sections = new Map();
    const above = back && el("p", { class: "small" }, el("a", { href: back.href }, back.name));
    const title = el("div", { class: "grow" }, above, el("h1", {}, heading), this.summary);
    put(root, el("div", { class: "head" }, title, this.levers), el("div", { class: "stack" }, this.refused, this.body));
  }

  /** Shows the error of a refresh; null removes it. Passed to `keepUp`. */
  failed = (error) => {
    put(this.refused, error && problemNote(error));
    if (!this.hasContent) put(this.body);
  };

  /**
   * Like `failed`, for the page of one thing that can be deleted: opens `list` when it is gone.
   * @param {string} list
   */
  failedOrGone = (list) => (error) => {
    const isGone = error instanceof Problem && error.status === 404 && this.hasContent;
    if (isGone) location.hash = list;
    else this.failed(error);
  };

  /** Replaces the loading note with what `lay` returns, once. Later refreshes redraw the sections in place. */
  fill(lay) {
    if (this.hasContent) return;
    this.hasContent = true;
    put(this.body, lay());
  }

  /**
   * A card that `draw` fills. It is redrawn only if `data` changed, so that focus and selection stay.
   * @param {string} title
   * @param {unknown} data
   * @param {() => unknown} draw null hides the card
   * @param {HTMLElement | false} [extra] shown next to the title
   */
  section(title, data, draw, extra = false) {
    if (!this.sections.has(title)) {
      const place = el("div", { class: "stack" });
      this.sections.set(title, { place, whole: card(extra ? [title, extra] : title, place) });
    }
    const { place, whole } = this.sections.get(title);
    redraw(place, JSON.stringify(data ?? null), draw);
    whole.hidden = !place.childNodes.length;
    return whole;
  }

  /** Describes the page below its heading. */
  describe(text) {
    say(this.summary, text);
  }

  /** Shows the levers. They stay in place until they change, because the user may be about to press one. */
  offer(actions, acted) {
    const key = JSON.stringify(actions);
    if (key === this.offered) return;
    this.offered = key;
    put(this.levers, actions.map((action) => actionButton(action, { refused: this.refused, acted })));
  }
}
