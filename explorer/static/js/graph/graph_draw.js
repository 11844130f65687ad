// What the graph draws where: the nodes and edges of every scope, moved apart where a block is open, and the overlays.

import { make } from "./svg_make.js";

/** @typedef {import("../types").SceneNode} SceneNode */
/** @typedef {import("../types").Scope} Scope */
/** @typedef {import("../types").Point} Point */
/** @typedef {import("../types").Push} Push */

const HEADER = 34;
const PAD = 16;

/** What the legend says of the kinds of splits that are drawn.
 * @type {(import("../types").LegendKey & { of: import("../types").Stripe["kind"][] })[]} */
const SPLITS = [
  {
    of: ["sharded", "both"],
    mark: "sharded",
    text: "gathered at use",
    means: "Each GPU stores a slice; the whole weight is fetched shortly before it is used, and dropped after",
  },
  {
    of: ["split", "both"],
    mark: "split",
    text: "split at use",
    means: "Each GPU stores a slice and computes with it alone",
  },
  { of: ["whole"], mark: "grey", text: "whole", means: "Each GPU stores and uses the whole weight" },
];

/** @type {import("../types").GraphData} */
const EMPTY = {
  key: "nothing yet",
  scene: { title: "", scopes: { "": { w: 0, h: 0, nodes: [], wires: [] } } },
  overlay: { split: {}, stages: {}, messages: {} },
  devices: [],
  selected: "",
  open: [],
  show: "split",
  asked: null,
};

/**
 * The element of this selector, which graph.html has.
 * @template {Element} T
 * @param {ParentNode} root
 * @param {string} selector
 * @param {new () => T} kind
 * @returns {T}
 */
export function find(root, selector, kind) {
  const found = root.querySelector(selector);
  if (!(found instanceof kind)) throw new Error(`graph.html lacks ${selector}`);
  return found;
}

export class Drawing {
  /** @param {ParentNode} root What holds the elements of graph.html. */
  constructor(root) {
    this.root = root;
    this.canvas = find(root, ".canvas", SVGSVGElement);
    this.world = find(root, ".world", SVGGElement);
    this.legend = find(root, ".legend", HTMLElement);
    this.data = EMPTY;
    /** @type {Set<string>} */
    this.open = new Set();
    /** @type {import("../types").Show} */
    this.show = "split";
    /** @type {import("../types").Shape[]} */
    this.shapes = [];
  }

  /**
   * Draw from these data from now on. Returns those before.
   * @param {import("../types").GraphData} data
   */
  take(data) {
    const before = this.data;
    this.data = data;
    return before;
  }

  get scene() {
    return this.data.scene;
  }

  get top() {
    return this.scene.scopes[""];
  }

  // --- what is drawn where ---------------------------------------------------------------------

  /**
   * What a block holds.
   * @param {SceneNode} node
   */
  scopeOf(node) {
    return this.scene.scopes[node.scope ?? ""];
  }

  /** @param {SceneNode} node */
  isOpen(node) {
    return node.kind === "block" && this.open.has(node.id);
  }

  /**
   * An open block is larger than its closed box: everything right of it, left of it and below it gives way.
   * @returns {Push[]}
   */
  pushes() {
    const opened = this.top.nodes.filter((n) => this.isOpen(n));
    return opened.map((n) => {
      const inside = this.scopeOf(n);
      return {
        left: n.x - n.w / 2,
        right: n.x + n.w / 2,
        bottom: n.y + n.h / 2,
        y: n.y,
        dw: Math.max(0, inside.w + 2 * PAD - n.w),
        dh: Math.max(0, inside.h + HEADER + PAD - n.h),
      };
    });
  }

  /**
   * Where a point comes to lie. Blocks of one row push together; of rows above each other, whose blocks may share
   * the room, the strongest push counts.
   * @param {Point} point
   * @param {Push[]} pushes
   * @returns {Point}
   */
  push([x, y], pushes) {
    /** @type {Map<number, { dx: number, dy: number }>} */
    const rows = new Map();
    for (const p of pushes) {
      const row = rows.get(p.y) || { dx: 0, dy: 0 };
      if (x <= p.left + 0.5) row.dx -= p.dw / 2;
      else if (x >= p.right - 0.5) row.dx += p.dw / 2;
      if (y >= p.bottom - 0.5) row.dy = Math.max(row.dy, p.dh);
      rows.set(p.y, row);
    }
    let left = 0;
    let right = 0;
    let down = 0;
    for (const { dx, dy } of rows.values()) {
      left = Math.min(left, dx);
      right = Math.max(right, dx);
      down += dy;
    }
    return [x + left + right, y + down];
  }

  draw() {
    this.world.replaceChildren();
    this.shapes = [];
    const pushes = this.pushes();
    for (const n of this.top.nodes) if (this.isOpen(n)) this.drawOpen(n, pushes);
    this.drawWires(this.top, (p) => this.push(p, pushes));
    for (const n of this.top.nodes) {
      if (this.isOpen(n)) continue;
      const [x, y] = this.push([n.x, n.y], pushes);
      this.drawNode(n, x, y);
    }
    this.mark();
    this.drawLegend();
  }

  /** Called when everything has been drawn: show what is selected. */
  mark() {}

  /**
   * @param {SceneNode} n
   * @param {Push[]} pushes
   */
  drawOpen(n, pushes) {
    const inside = this.scopeOf(n);
    const [x] = this.push([n.x, n.y], pushes);
    const [, y] = this.push([n.x, n.y - n.h / 2], pushes);
    const w = Math.max(n.w, inside.w + 2 * PAD);
    const h = inside.h + HEADER + PAD;
    const g = this.group(n, x, y + h / 2, w, h);
    g.classList.add("opened");
    this.stack(g, n, x, y, w, h);
    make("text", { class: "title", x: x - w / 2 + 34, y: y + 21 }, g, n.name);
    this.toggle(g, n, x - w / 2 + 17, y + 17, "–");
    this.times(g, n, x + w / 2, y);
    this.stages(g, n, x + w / 2, y, h);
    /** @type {(point: Point) => Point} */
    const move = ([a, b]) => [a + x - inside.w / 2, b + y + HEADER];
    this.drawWires(inside, move);
    for (const inner of inside.nodes) this.drawNode(inner, ...move([inner.x, inner.y]), n);
  }

  /**
   * The box of a block; of one that repeats, a stack of boxes.
   * @param {SVGGElement} g
   * @param {SceneNode} n
   * @param {number} x
   * @param {number} y
   * @param {number} w
   * @param {number} h
   */
  stack(g, n, x, y, w, h) {
    const deep = (n.copies ?? 1) > 1 ? [10, 5] : [];
    for (const d of deep) make("rect", { class: "behind", x: x - w / 2 + d, y: y - d, width: w, height: h, rx: 10 }, g);
    return make("rect", { class: "body", x: x - w / 2, y, width: w, height: h, rx: 10 }, g);
  }

  /**
   * The pipeline stages of a node, at its right side: a stack is as many pieces as it has stages, each as long as its copies. The stage
   * of a single node stands above it where another node is to its right.
   * @param {SVGGElement} g
   * @param {SceneNode} n
   * @param {number} right
   * @param {number} top
   * @param {number} h
   */
  stages(g, n, right, top, h) {
    const known = this.data.overlay.stages[n.id];
    if (!known) return;
    const s = make("g", { class: "stages" }, g);
    if (n.kind !== "block") {
      const taken = this.top.nodes.some((m) => m !== n && Math.abs(m.y - n.y) < h / 2 && m.x > n.x);
      const at = taken ? { x: right - n.w, y: top - 6 } : { x: right + 6, y: top + h / 2 + 4 };
      make("text", at, s, `stage ${known[0][0]}`);
      return;
    }
    const all = known.reduce((sum, [, copies]) => sum + copies, 0);
    const from = top + 14;
    const high = (h - 14) / all;
    let before = 0;
    for (const [stage, copies] of known) {
      const y = from + before * high;
      const tall = copies * high;
      const fill = this.data.devices[stage % this.data.devices.length];
      make("rect", { x: right + 15, y, width: 5, height: Math.max(1, tall - 2), fill, rx: 2 }, s);
      const words = tall > 28 ? `stage ${stage}: ${copies}` : `${stage}`;
      if (tall >= 13) make("text", { x: right + 24, y: y + tall / 2 + 4 }, s, words);
      before += copies;
    }
  }

  /**
   * How many copies a block stands for, where its stack has its corner.
   * @param {SVGGElement} g
   * @param {SceneNode} n
   * @param {number} right
   * @param {number} top
   */
  times(g, n, right, top) {
    const copies = n.copies ?? 1;
    if (copies < 2) return;
    const words = `× ${copies}`;
    const w = 22 + 9 * words.length;
    const b = make("g", { class: "times" }, g);
    make("rect", { x: right - w + 16, y: top - 20, width: w, height: 28, rx: 14 }, b);
    make("text", { x: right - w / 2 + 16, y: top - 0.5 }, b, words);
  }

  /**
   * @param {SceneNode} n
   * @param {number} x
   * @param {number} y
   * @param {number} w
   * @param {number} h
   */
  group(n, x, y, w, h) {
    const g = make("g", { class: `node ${n.kind}`, "data-id": n.id }, this.world);
    this.shapes.push({ n, g, x, y, w, h });
    return g;
  }

  /**
   * @param {SceneNode} n
   * @param {number} x
   * @param {number} y
   * @param {SceneNode} [parent]
   */
  drawNode(n, x, y, parent) {
    const g = this.group(n, x, y, n.w, n.h);
    g.dataset.parent = parent ? parent.id : "";
    const top = y - n.h / 2;
    if (n.kind === "port") {
      make("circle", { class: "body", cx: x, cy: y, r: 3.5 }, g);
      return;
    }
    const round = n.name === "+" ? n.h / 2 : 6;
    const body =
      n.kind === "block"
        ? this.stack(g, n, x, top, n.w, n.h)
        : make("rect", { class: "body", x: x - n.w / 2, y: top, width: n.w, height: n.h, rx: round }, g);
    this.tint(n, body, g);
    this.words(g, n, x, y);
    if (n.kind === "block") {
      this.toggle(g, n, x - n.w / 2 + 17, top + 17, "+");
      this.times(g, n, x + n.w / 2, top);
    }
    this.stages(g, n, x + n.w / 2, top, n.h);
    this.bare(g, n, x + n.w / 2 - 3, y + n.h / 2 - 3);
  }

  /**
   * The name of a node, and below it how its weight is split, or a second line.
   * @param {SVGGElement} g
   * @param {SceneNode} n
   * @param {number} x
   * @param {number} y
   */
  words(g, n, x, y) {
    const top = y - n.h / 2;
    const block = n.kind === "block";
    const stripe = this.show === "split" ? this.data.overlay.split[n.id] : undefined;
    const second = stripe ? "" : this.second(n);
    const told = stripe && !this.uniform() ? stripe.words : "";
    let line = second ? y - 2 : y + 4.5;
    if (stripe) line = top + (told ? 14 : 18);
    if (block) line = top + 24;
    make("text", { class: "name", x, y: line }, g, n.name);
    if (stripe) this.stripe(g, stripe, told, x, line + (block ? 8 : 5), n.w);
    else if (second) make("text", { class: "sub", x, y: line + 14 }, g, second);
  }

  /**
   * An op without a rule wears an exclamation mark at its lower right corner, and so does a closed block with one inside.
   * @param {SVGGElement} g
   * @param {SceneNode} n
   * @param {number} x
   * @param {number} y
   */
  bare(g, n, x, y) {
    const known = this.data.bare ?? {};
    if (!known[n.id] && !(n.scope && this.scopeOf(n).nodes.some((m) => known[m.id]))) return;
    const b = make("g", { class: "bare" }, g);
    make("rect", { x: x - 7, y: y - 8, width: 14, height: 16, rx: 3 }, b);
    make("text", { x, y: y + 4.5 }, b, "!");
  }

  /**
   * The button that opens or closes a block.
   * @param {SVGGElement} g
   * @param {SceneNode} n
   * @param {number} x
   * @param {number} y
   * @param {string} sign
   */
  toggle(g, n, x, y, sign) {
    const t = make("g", { class: "toggle", "data-toggle": n.id }, g);
    make("rect", { x: x - 9, y: y - 9, width: 18, height: 18, rx: 5 }, t);
    make("text", { x, y: y + 5 }, t, sign);
  }

  /**
   * @param {Scope} scope
   * @param {(point: Point) => Point} move
   */
  drawWires(scope, move) {
    for (const [src, dst, flat] of scope.wires) {
      /** @type {Point[]} */
      const points = [];
      for (let i = 0; i < flat.length; i += 2) points.push(move([flat[i], flat[i + 1]]));
      const lane = flat.some((v, i) => i % 2 && i > 2 && v === flat[i - 2]);
      const sent = this.sent(src).filter((m) => m.where === "after");
      const kind = `wire${lane ? " lane" : ""}${sent.length ? " sends" : ""}`;
      const d = lane ? rounded(points) : curved(points);
      const wire = make("path", { class: kind, d, "data-src": src, "data-dst": dst }, this.world);
      if (sent.length) wire.style.strokeWidth = String(thickness(sent.reduce((a, m) => a + m.bytes * m.count, 0)));
    }
  }

  // --- overlays ----------------------------------------------------------------------------------

  /**
   * The collectives of a node in the phase that is shown.
   * @param {string} id
   */
  sent(id) {
    if (this.show !== "forward" && this.show !== "backward") return [];
    return (this.data.overlay.messages[id] ?? []).filter((m) => m.phase === this.show);
  }

  /** What is shown as shades: memory or FLOPs; else undefined. */
  heat() {
    return this.show === "memory" || this.show === "flops" ? this.data.overlay[this.show] : undefined;
  }

  /**
   * A node's words and its share of the most, if shades are shown.
   * @param {string} id
   * @returns {[words: string, share: number] | null}
   */
  heatOf(id) {
    if (this.show !== "memory" && this.show !== "flops") return null;
    return this.heat()?.nodes[id] ?? ["", 0];
  }

  /**
   * The words below a node's name.
   * @param {SceneNode} n
   */
  second(n) {
    const heat = this.heatOf(n.id);
    if (heat) return heat[0];
    if (this.show === "split") return n.sub;
    const sent = this.sent(n.id);
    if (!sent.length) return n.kind === "block" ? n.sub : "";
    return sent.length === 1 ? `${sent[0].kind} ${sent[0].text}` : `${sent[0].kind} +${sent.length - 1} more`;
  }

  /**
   * @param {SceneNode} n
   * @param {SVGRectElement} body
   * @param {SVGGElement} g
   */
  tint(n, body, g) {
    if (this.show === "split") g.classList.add(this.data.overlay.split[n.id]?.kind ?? "none");
    const heat = this.heatOf(n.id);
    if (heat) body.style.fill = this.shade(heat[1]);
    if (!this.sent(n.id).length) return;
    body.style.stroke = "#D55E00";
    body.style.strokeWidth = "2";
  }

  /** @param {number} share */
  shade(share) {
    const colour = this.show === "memory" ? "#009E73" : "#0072B2";
    return `color-mix(in srgb, ${colour} ${Math.round(6 + 60 * share)}%, var(--st-background-color))`;
  }

  /** Whether all weights are split in one way, which the name of the plan then says. */
  uniform() {
    return new Set(Object.values(this.data.overlay.split).map((one) => one.words)).size === 1;
  }

  /**
   * The parts of a weight in the colours of the GPUs that hold them, and below how it is split.
   * @param {SVGGElement} g
   * @param {import("../types").Stripe} stripe
   * @param {string} told
   * @param {number} x
   * @param {number} y
   * @param {number} width
   */
  stripe(g, stripe, told, x, y, width) {
    const parts = Math.min(stripe.n, 16);
    const left = x - width / 2 + 8;
    const one = (width - 16) / parts;
    const colours = this.data.devices;
    for (let k = 0; k < parts; k++) {
      const fill = parts > 1 ? colours[k % colours.length] : "";
      const cell = make("rect", { x: left + k * one, y, width: Math.max(1, one - 0.8), height: 6, rx: 1 }, g);
      if (fill) cell.setAttribute("fill", fill);
      else cell.setAttribute("class", "whole");
    }
    if (told) make("text", { class: "how", x, y: y + 16 }, g, told);
  }

  /**
   * What the legend says; the page and a saved picture draw the same entries.
   * @returns {import("../types").LegendKey[]}
   */
  keys() {
    /** @type {import("../types").LegendKey[]} */
    const found = [];
    if (this.show === "split") {
      const kinds = new Set(Object.values(this.data.overlay.split).map((one) => one.kind));
      found.push({ mark: "slices", text: "GPUs that hold a part" });
      for (const { of, ...entry } of SPLITS) if (of.some((kind) => kinds.has(kind))) found.push(entry);
    }
    for (const [share, text] of this.heat()?.scale ?? []) found.push({ mark: "shade", fill: this.shade(share), text });
    if (this.show === "forward" || this.show === "backward") found.push({ mark: "line", text: "sends" });
    const words = this.data.overlay.words?.[this.show];
    if (words) found.push({ text: words });
    if (Object.keys(this.data.bare ?? {}).length)
      found.push({ mark: "bare", text: "no rule: runs whole on every GPU" });
    return found;
  }

  drawLegend() {
    const entries = this.keys().map(({ mark, fill, text, means }) => {
      const span = document.createElement("span");
      span.title = means ?? "";
      if (mark) {
        const i = span.appendChild(document.createElement("i"));
        i.className = mark;
        if (mark === "bare") i.textContent = "!";
        if (fill) i.style.background = fill;
      }
      span.append(text);
      return span;
    });
    this.legend.replaceChildren(...entries);
    this.legend.hidden = !entries.length;
  }
}

/**
 * A path of curves that leave and reach each point upright.
 * @param {Point[]} points
 */
function curved(points) {
  let d = `M${points[0]}`;
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1];
    const [x1, y1] = points[i];
    const m = (y0 + y1) / 2;
    d += x0 === x1 ? `L${x1},${y1}` : `C${x0},${m} ${x1},${m} ${x1},${y1}`;
  }
  return d;
}

/**
 * A path of right angles with corners of radius 8.
 * @param {Point[]} points
 */
function rounded(points) {
  let d = `M${points[0]}`;
  for (let i = 1; i < points.length - 1; i++) {
    const [a, b, c] = [points[i - 1], points[i], points[i + 1]];
    const r = Math.min(8, distance(a, b) / 2, distance(b, c) / 2);
    d += `L${toward(b, a, r)}Q${b} ${toward(b, c, r)}`;
  }
  return `${d}L${points[points.length - 1]}`;
}

/**
 * @param {Point} a
 * @param {Point} b
 */
function distance(a, b) {
  return Math.hypot(b[0] - a[0], b[1] - a[1]);
}

/**
 * The point at `length` from `b` on the way to `p`.
 * @param {Point} b
 * @param {Point} p
 * @param {number} length
 * @returns {Point}
 */
function toward(b, p, length) {
  const whole = distance(b, p) || 1;
  return [b[0] + ((p[0] - b[0]) / whole) * length, b[1] + ((p[1] - b[1]) / whole) * length];
}

/** @param {number} bytes */
function thickness(bytes) {
  return Math.min(7, 1.5 + Math.log10(1 + bytes / 1e5) * 1.1);
}
