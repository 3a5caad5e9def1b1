// Cards with charts, of pages and of report files.

import { card, el, put } from "./dom.js";
import { chart } from "./plotting.js";

/**
 * Cards in `place` that are drawn once and updated with new data.
 */
export class ChartCards {
  /** @type {Map<string, {whole: HTMLElement, drawn: ReturnType<typeof chart>}>} */
  #cards = new Map();

  /**
   * @param {AbortSignal} signal
   * @param {HTMLElement} place
   */
  constructor(signal, place = el("div", { class: "halves" })) {
    this.signal = signal;
    this.place = place;
  }

  /**
   * Shows a card per chart: its title, the drawing, and the caption.
   * @param {import("../types/charts").Chart[]} charts with a title each
   */
  update(charts) {
    const cards = charts.map((each) => this.#card(each));
    const shown = [...this.place.children];
    if (cards.length !== shown.length || cards.some((each, at) => each !== shown[at])) put(this.place, cards);
  }

  /** @param {import("../types/charts").Chart} chart */
  #card({ title, caption, spec, data, span }) {
    if (!this.#cards.has(title)) {
      const body = el("div", {});
      const unit = el("span", { class: "small muted" }, spec.unit);
      const whole = card([title, unit], body, caption && el("p", { class: "small muted" }, caption));
      this.#cards.set(title, { whole, drawn: chart(body, spec, this.signal) });
    }
    const { whole, drawn } = this.#cards.get(title);
    drawn.update(data, undefined, span);
    return whole;
  }
}
