// Libraries that the pages load with a script tag, and properties that pages set on elements.

import type uPlotClass from "uplot";

declare global {
  interface Window {
    /** Absent if the chart library is not installed. */
    uPlot?: typeof uPlotClass;
  }

  /** Swagger UI, on the page of the API reference only. */
  const SwaggerUIBundle: (options: Record<string, unknown>) => unknown;
}
