// Curves of several jobs over their steps, aligned for one chart.

/**
 * Returns [xs, ys of each curve]: all x of the curves in ascending order, and null where a curve has no point. Of
 * points at the same x, the last one counts: a job that lost work repeats its steps.
 * @param {{x: number, y: number | null}[][]} curves
 * @returns {[number[], ...(number | null)[][]]}
 */
export function alignCurves(curves) {
  const known = curves.map((points) => new Map(points.filter(({ y }) => y !== null).map(({ x, y }) => [x, y])));
  const xs = [...new Set(known.flatMap((points) => [...points.keys()]))].sort((a, b) => a - b);
  return [xs, ...known.map((points) => xs.map((x) => points.get(x) ?? null))];
}

/**
 * Returns a column of a job's samples over its steps.
 * @param {{steps: number, [column: string]: any}[]} samples
 * @param {string} column
 */
export function curveOf(samples, column) {
  return samples.map((sample) => ({ x: sample.steps, y: sample[column] ?? null }));
}
