// The nodes of the fleet, kept up to date from the overview, which sends only the nodes that changed.

import { get } from "./api.js";

/** A node in the overview: {name, pool, gpu, state, gpus, held, inference}. */
export class FleetNodes {
  constructor() {
    this.nodes = new Map();
    this.overview = null;
  }

  /** Requests the changes since the last call. */
  async refresh(signal) {
    const overview = await get("/v1/overview", { query: { generation: this.overview?.generation }, signal });
    if (overview.complete) this.nodes.clear();
    for (const node of overview.nodes) this.nodes.set(node.name, node);
    for (const name of overview.gone) this.nodes.delete(name);
    this.overview = overview;
  }
}

/**
 * Returns the nodes that match all filters: `name` is a part of the name, without regard to case; the others are equal.
 * @param {Iterable<any>} nodes
 * @param {{name?: string, pool?: string, state?: string, gpu?: string}} wanted
 */
export function filterNodes(nodes, { name = "", pool = "", state = "", gpu = "" }) {
  const part = name.toLowerCase();
  const isMatch = (node) => [[pool, node.pool], [state, node.state], [gpu, node.gpu]]
    .every(([want, has]) => !want || want === has);
  return [...nodes].filter((node) => isMatch(node) && node.name.toLowerCase().includes(part));
}
