// What Python sends to the components, and what the JavaScript beside this file hands on. For the type checker only.

/** What Streamlit gives a component: its data, the place to draw in, and ways to answer. */
export interface Component<Data> {
  data: Data;
  parentElement: ShadowRoot;
  setStateValue(name: string, value: unknown): void;
  setTriggerValue(name: string, value: unknown): void;
}

export type Point = [x: number, y: number];

/** A node of a drawing (explorer/graph/scene_json.py). `scope` names what a block holds; `facts` are lines of its card. */
export interface SceneNode {
  id: string;
  name: string;
  sub: string;
  kind: "weight" | "attention" | "loss" | "block" | "norm" | "join" | "op" | "port";
  x: number;
  y: number;
  w: number;
  h: number;
  scope?: string;
  copies?: number;
  facts?: [name: string, value: string][];
}

/** The nodes of one block, or of the top (""); a wire is [from, to, x and y of its corners in turn]. */
export interface Scope {
  w: number;
  h: number;
  nodes: SceneNode[];
  wires: [src: string, dst: string, corners: number[]][];
}

export interface Scene {
  title: string;
  scopes: Record<string, Scope>;
}

/** How a plan splits a node's weight (explorer/graph/stripes.py): in how many parts, and in words. */
export interface Stripe {
  n: number;
  kind: "whole" | "sharded" | "split" | "both";
  words: string;
}

/** A collective that a node runs (explorer/graph/overlay.py). */
export interface Message {
  phase: string;
  kind: string;
  axis: string;
  bytes: number;
  text: string;
  count: number;
  where: "before" | "after" | "weight";
  what: string;
}

/** By node what it has, in words and as a share of the most; `scale` are the shades of the legend. */
export interface Heat {
  nodes: Record<string, [words: string, share: number]>;
  scale: [share: number, words: string][];
}

export interface Overlay {
  split: Record<string, Stripe>;
  /** Pipeline stages of a node of the top, in order, each with its copies. */
  stages: Record<string, [stage: number, copies: number][]>;
  messages: Record<string, Message[]>;
  memory?: Heat;
  flops?: Heat;
  words?: Record<string, string>;
}

export type Show = "split" | "memory" | "flops" | "forward" | "backward";

/** What the graph is drawn from. `bare` says by node why it runs whole. */
export interface GraphData {
  key: string;
  scene: Scene;
  overlay: Overlay;
  bare?: Record<string, string>;
  devices: string[];
  selected: string;
  open: string[];
  show: Show;
  asked: unknown;
  height?: number;
}

/** What was drawn for a node, and where its middle is. */
export interface Shape {
  n: SceneNode;
  g: SVGGElement;
  x: number;
  y: number;
  w: number;
  h: number;
}

/** How far an open block moves what is right of it, left of it and below it. */
export interface Push {
  left: number;
  right: number;
  bottom: number;
  y: number;
  dw: number;
  dh: number;
}

/** An entry of the legend: words, and the mark before them. */
export interface LegendKey {
  mark?: "grey" | "slices" | "sharded" | "split" | "shade" | "line" | "bare";
  fill?: string;
  text: string;
  means?: string;
}

export interface RailData {
  lessons: {
    number: number;
    key: string;
    title: string;
    query: string;
    state: string;
    done: boolean;
    answer: string;
  }[];
  forgotten: number;
}

/** One case of an exported lesson (explorer/learn/export.py); the markup in it was made and escaped in Python. */
export interface Case {
  name: string;
  with: string;
  note: string;
  reveal: number;
  steps: { title: string; says: string; picture: string }[];
  question: Asked;
}

/** A question (explorer/learn/lesson.py). Markup in it was made and escaped in Python. */
export interface Asked {
  ask: string;
  options: string[];
  answer: number;
  why: string[];
}

/** Work of a step: stream, kind, part of the model (words), start and length in seconds, name (words), note (words), odd copy, not dim. */
export type StreamWork = [
  stream: number,
  kind: number,
  part: number,
  start: number,
  seconds: number,
  name: number,
  note: number,
  odd: number,
  group: number,
];

/** The steps of plans (explorer/analysis/streams.py). A kind without a colour is drawn in the page's ink; `words` of the
 * legend. A plan with stages has a lane for each rank of its pipeline, and `group` is the number of a work's micro-batch, 0 for none. */
export interface StreamsData {
  plans: { name: string; told: string; step_s: number; lanes: string[]; staged: boolean; works: StreamWork[] }[];
  kinds: { words: string; told: string; colour: string; ink: string; pale: boolean; hatch?: boolean }[];
  words: string[];
  alt: string;
}

/** A prediction to draw (explorer/learn/pictures/sketch.py): values from 0 to `most` lie between `from` and `to` of the drawing. */
export interface Sketch {
  key: string;
  look: "bar" | "span" | "point";
  unit: string;
  most: number;
  from: number;
  to: number;
  why: string;
  handles: { name: string; start: number; truth: number; line: number }[];
  slips: { values: (number | null)[]; why: string }[];
}

/** One figure of a plan (explorer/components/overview/table.py). `order` sorts; `memory` is what is filled, and what is likely. A
 * bar that is `cut` is longer than its place. */
/** `unit` and `belowUnit` are those that the head states for all rows. */
export interface PlanCell {
  figure: string;
  below: string;
  unit?: string;
  belowUnit?: string;
  hover?: string;
  order: number;
  bar?: [part: string, share: number, words: string][];
  cut?: boolean;
  memory?: [filled: number, likely: number, over: boolean];
}
/** A row that can be chosen: a plan, a point of a sweep, a published run. */
export interface PlanRow {
  id: string;
  name: string;
  what: string;
  fits: boolean;
  cells: PlanCell[];
}
/** `first` heads the names; `labels` name the cells of a card; `terms` are words of the names with their meanings. */
export interface PlansData {
  label: string;
  first: string;
  head: string[];
  labels: string[];
  rows: PlanRow[];
  chosen: string;
  terms: Record<string, string>;
}

/** An axis of a chart: its name, its ends, and its round values with their texts. */
export interface ChartAxis {
  name: string;
  low: number;
  high: number;
  ticks: [value: number, text: string][];
}
/** Where a point's name lies: pixels right of and below the point, and whether a line joins the two. */
export type NamePlace = [right: number, down: number, joined: boolean];
/** A plan as a point; `places` has one place for each of the chart's `widths`, none where the point has no name. */
export interface PlanPoint {
  id: string;
  kind: number;
  x: number;
  y: number;
  name: string;
  figures: string[];
  tie: boolean;
  chosen: boolean;
  places: NamePlace[];
}
/** Plans in time and memory (explorer/figures/plans_chart.py). A line joins the points of the first kind; `widths` are the widest plots,
 * in pixels, of the names' places. */
export interface PlansChart {
  alt: string;
  x: ChartAxis;
  y: ChartAxis;
  limit: [gib: number, words: string];
  widths: number[];
  kinds: [words: string, mark: "circle" | "triangle" | "diamond" | "square", colour: string][];
  points: PlanPoint[];
}
