// Specification of a chart. Pages of the console and report files draw the same specifications.

/** A name of a colour in tokens.css, without the dashes. */
type Colour = string;

export interface ChartSeries {
  label: string;
  /** Colour of the line. Default: no line. */
  colour?: Colour;
  /** Lengths of dashes and gaps in pixels. */
  dash?: number[];
  /** Colour of the area below the line. */
  fill?: Colour;
  /** Colour in the legend. Default: that of the area or the line. */
  swatch?: Colour;
  /** Draws values as steps that begin at their x. */
  stepped?: boolean;
  /** Draws values as bars. */
  bars?: boolean;
  width?: number;
  /** Draws a point at each value. With "only", no line. */
  points?: boolean | "only";
  /** Default: the unit of the chart. */
  unit?: string;
  /** Appears in the legend and the table only. */
  apart?: boolean;
  /** Is drawn, but only listed in the table. */
  quiet?: boolean;
}

/** A vertical line. */
export interface ChartMark {
  x: number;
  label: string;
}

export interface ChartSpec {
  /** Name for screen readers and of the table. */
  label: string;
  /** In the order of the columns after x. */
  series: ChartSeries[];
  /** Areas between two series: numbers of the upper and the lower one, from 1, and the colour. */
  bands?: [number, number, Colour][];
  marks?: ChartMark[];
  unit?: string;
  /** "time" for Unix seconds, else the label of the x axis. */
  xs?: "time" | string;
  /** Format of x values other than times. "day": Unix seconds at midnight (UTC). Default: numbers. */
  xFormat?: "number" | "duration" | "day";
  xScale?: "linear" | "log";
  /** "symlog": linear near zero and logarithmic above 10. */
  yScale?: "linear" | "log" | "symlog";
  height?: number;
  /** Whether the y axis begins at zero. Default: true. */
  fromZero?: boolean;
  /** Top of the y axis as a multiple of the largest value. */
  headroom?: number;
  /** Breaks lines at nulls. */
  gaps?: boolean;
  /** Charts with the same value share the cursor and the zoom. */
  together?: string;
  /** Dragging over the chart zooms in, a double click shows everything again. */
  zoom?: boolean;
  /** Draws on top of each drawing. */
  drawn?: (plot: import("uplot")) => void;
  /** Receives the x of a click. */
  picked?: (x: number) => void;
}

/** x in ascending order, then a column per series. */
export type ChartData = [number[], ...(number | null)[][]];

/** A chart with its data, for a card of its own. */
export interface Chart {
  title: string;
  /** Explains how to read the chart. */
  caption?: string;
  spec: ChartSpec;
  data: ChartData;
  /** Covered x range. Default: that of the data. */
  span?: [number, number];
}
