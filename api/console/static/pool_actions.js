// Levers of a pool's lending.

/** Returns the actions for a pool. `disabledReason`: why this user may not use them. */
export function poolActions(pool, disabledReason) {
  if (!pool.lending) return [];
  const path = `/v1/pools/${encodeURIComponent(pool.name)}`;
  const change = (lending) => ({ method: "PATCH", path, body: { lending }, disabledReason });
  const stop = {
    ...change({ enabled: false }),
    name: "Stop lending",
    title: `Stop lending nodes of ${pool.name}?`,
    what: ["No new loans are made from this pool. Its live loans are recalled."],
    done: `Pool ${pool.name} lends no nodes.`,
    danger: true,
  };
  const start = {
    ...change({ enabled: true }),
    name: "Start lending",
    title: `Lend nodes of ${pool.name}?`,
    what: ["Idle nodes of the pool are lent to training within the limits of its policy."],
    done: `Pool ${pool.name} lends idle nodes.`,
  };
  const shadow = {
    ...change({ mode: "shadow" }),
    name: "Enter shadow mode",
    title: `Put ${pool.name} into shadow mode?`,
    what: ["No node is lent. The service records the loans that it would have made."],
    done: `Pool ${pool.name} is in shadow mode.`,
  };
  const lend = {
    ...change({ mode: "lend" }),
    name: "Leave shadow mode",
    title: `Lend nodes of ${pool.name} for real?`,
    what: ["Idle nodes of the pool are lent to training within the limits of its policy."],
    done: `Pool ${pool.name} lends idle nodes.`,
  };
  const { enabled, mode } = pool.lending;
  return [enabled ? stop : start, enabled && (mode === "shadow" ? lend : shadow)].filter(Boolean);
}
