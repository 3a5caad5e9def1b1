// Navigation: the pages in groups. Narrow windows show it as a menu.

import { el, put } from "./dom.js";
import { mayAnywhere } from "./permissions.js";

/**
 * A page in the navigation. `role`: the role that a user needs on at least one queue to see the page in the list.
 * @typedef {{name?: string, href?: string, group?: string, role?: string, within?: string}} Entry
 * @typedef {{name: string, grants: string[]}} User
 */

export const GROUPS = ["Fleet", "Work", "Insight", "Administration"];

/**
 * Returns the named pages by group, in the order of GROUPS, without pages that the user may not open. Before the user
 * is known, pages that need a role are left out.
 * @param {Entry[]} pages
 * @param {User | null} user
 * @returns {[string, Entry[]][]}
 */
export function groupPages(pages, user) {
  const isListed = (page) => page.name && (!page.role || (user && mayAnywhere(user, page.role)));
  const listed = pages.filter(isListed);
  /** @type {[string, Entry[]][]} */
  const groups = GROUPS.map((group) => [group, listed.filter((page) => page.group === group)]);
  return groups.filter(([, members]) => members.length);
}

/** The list of pages and the button that opens it in a narrow window. */
export class Navigation {
  /**
   * @param {HTMLElement} place
   * @param {HTMLElement} button
   * @param {Entry[]} pages
   */
  constructor(place, button, pages) {
    this.place = place;
    this.button = button;
    this.pages = pages;
    /** @type {User | null} */
    this.user = null;
    /** @type {Entry | undefined} */
    this.current = undefined;
    button.addEventListener("click", () => this.#open(button.getAttribute("aria-expanded") !== "true"));
    const closeOnEscape = (event) => {
      if (event.key !== "Escape" || button.getAttribute("aria-expanded") !== "true") return;
      this.#open(false);
      button.focus();
    };
    place.parentElement.addEventListener("keydown", closeOnEscape);
  }

  /** Marks `page` as the current one and closes the menu. */
  show(page) {
    this.current = page;
    this.#open(false);
    this.#draw();
  }

  /** Lists the pages that `user` may open. */
  allow(user) {
    this.user = user;
    this.#draw();
  }

  #open(isOpen) {
    this.button.setAttribute("aria-expanded", String(isOpen));
    this.place.dataset.open = String(isOpen);
  }

  #draw() {
    const groups = groupPages(this.pages, this.user);
    put(this.place, groups.map(([name, pages], at) => this.#group(`nav-${at}`, name, pages)));
  }

  #group(id, name, pages) {
    const links = pages.map((page) => el("li", {}, this.#link(page)));
    return el("div", {}, el("p", { id, class: "nav-group" }, name), el("ul", { "aria-labelledby": id }, links));
  }

  #link(page) {
    const isCurrent = page === this.current || this.current?.within === page.href;
    return el("a", { href: page.href, "aria-current": isCurrent ? "page" : null }, page.name);
  }
}
