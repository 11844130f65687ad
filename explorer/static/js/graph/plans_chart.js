// Plans as points of time and memory, as wide as its place. A click chooses the nearest plan, whose figures the pointer shows.

import { placeCard } from "./graph_card.js";
import { make } from "./svg_make.js";

/** @typedef {import("../types").PlansChart} PlansChart */
/** @typedef {import("../types").PlanPoint} PlanPoint */

const LEFT = 42;
const RIGHT = 12;
const TOP = 30;
const HEIGHT = 402;
const BOTTOM = TOP + HEIGHT;
/** How near to a point, in pixels, the pointer means it. */
const REACH = 24;
const MARKS = {
  circle: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0Z",
  triangle: "M0-7L6.8 5.5H-6.8Z",
  diamond: "M0-8L8 0 0 8-8 0Z",
  square: "M-5.5-5.5h11v11h-11Z",
};

/** @type {WeakMap<Element, Chart>} */
const charts = new WeakMap();

/** @param {import("../types").Component<PlansChart>} component */
export default function ({ data, parentElement, setStateValue }) {
  const box = parentElement.querySelector(".chart");
  if (!box) return;
  const chart = charts.get(box) ?? new Chart(box);
  charts.set(box, chart);
  chart.data = data;
  chart.choose = (id) => setStateValue("chosen", { at: Date.now(), id });
  chart.draw();
}

class Chart {
  /** @param {Element} box */
  constructor(box) {
    this.box = box;
    this.svg = make("svg", { role: "img" }, box);
    this.card = Object.assign(document.createElement("div"), { className: "card", hidden: true });
    this.legend = Object.assign(document.createElement("ul"), { className: "legend" });
    box.append(this.card, this.legend);
    /** @type {PlansChart | null} */
    this.data = null;
    /** @type {(id: string) => void} */
    this.choose = () => {};
    this.svg.addEventListener("pointermove", (e) => this.hover(e));
    this.svg.addEventListener("pointerleave", () => this.hover(null));
    this.svg.addEventListener("click", (e) => {
      const point = this.nearest(e);
      if (point) this.choose(point.id);
    });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  get width() {
    return Math.max(1, this.box.clientWidth - LEFT - RIGHT);
  }

  /** @param {{ x: number, y: number }} point @returns {[number, number]} */
  place({ x, y }) {
    const [across, up] = [this.data?.x ?? { low: 0, high: 1 }, this.data?.y ?? { low: 0, high: 1 }];
    return [
      LEFT + ((x - across.low) / (across.high - across.low)) * this.width,
      BOTTOM - ((y - up.low) / (up.high - up.low)) * HEIGHT,
    ];
  }

  /** @param {MouseEvent} e */
  nearest(e) {
    const box = this.svg.getBoundingClientRect();
    /** @type {PlanPoint | null} */
    let found = null;
    let least = REACH;
    for (const point of this.data?.points ?? []) {
      const [x, y] = this.place(point);
      const distance = Math.hypot(e.clientX - box.left - x, e.clientY - box.top - y);
      if (distance < least) [found, least] = [point, distance];
    }
    return found;
  }

  /** @param {MouseEvent | null} e */
  hover(e) {
    const point = e && this.nearest(e);
    this.svg.classList.toggle("on", Boolean(point));
    this.card.hidden = !point;
    if (!point) return;
    const name = Object.assign(document.createElement("b"), { textContent: point.name });
    const lines = point.figures.map((text) => Object.assign(document.createElement("span"), { textContent: text }));
    this.card.replaceChildren(name, ...lines);
    placeCard(this.card, this.box, e);
  }

  draw() {
    const data = this.data;
    if (!data) return;
    this.svg.replaceChildren();
    this.svg.setAttribute("aria-label", data.alt);
    this.drawAxes(data);
    const front = data.points.filter((p) => p.kind === 0).sort((a, b) => a.x - b.x || a.y - b.y);
    const line = front.map((p) => this.place(p)).join("L");
    if (line) make("path", { class: "front", d: `M${line}`, stroke: data.kinds[0][2] }, this.svg);
    const group = data.widths.findIndex((widest) => this.width <= widest);
    for (const point of data.points) this.drawMark(point, data);
    for (const point of data.points) this.drawName(point, point.places.at(group));
    const kinds = data.kinds.filter((_, k) => data.points.some((p) => p.kind === k));
    this.legend.replaceChildren(
      ...kinds.map(([words, mark, colour]) => entry(words, { d: MARKS[mark], fill: colour })),
    );
    if (data.points.some((p) => p.tie))
      this.legend.append(entry("tie with the best", { d: MARKS.circle, class: "tie" }));
    this.legend.append(entry("chosen", { d: MARKS.circle, class: "chosen" }));
  }

  /** @param {PlansChart} data */
  drawAxes({ x, y, limit }) {
    const right = LEFT + this.width;
    for (const [value, text] of y.ticks) {
      const at = this.place({ x: x.low, y: value })[1];
      make("path", { class: "grid", d: `M${LEFT} ${at}H${right}` }, this.svg);
      make("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, this.svg, text);
    }
    for (const [value, text] of x.ticks) {
      const at = this.place({ x: value, y: y.low })[0];
      make("path", { class: "grid", d: `M${at} ${TOP}V${BOTTOM}` }, this.svg);
      make("text", { x: at, y: BOTTOM + 17, "text-anchor": "middle" }, this.svg, text);
    }
    make("text", { x: 0, y: 13 }, this.svg, y.name);
    make("text", { x: LEFT + this.width / 2, y: BOTTOM + 38, "text-anchor": "middle" }, this.svg, x.name);
    const at = this.place({ x: x.low, y: limit[0] })[1];
    make("path", { class: "limit", d: `M${LEFT} ${at}H${right}` }, this.svg);
    make("text", { x: LEFT + 2, y: at - 6 }, this.svg, limit[1]);
  }

  /** @param {PlanPoint} point @param {PlansChart} data */
  drawMark(point, data) {
    const [x, y] = this.place(point);
    const [, mark, colour] = data.kinds[point.kind];
    const g = make("g", { class: "point", "data-id": point.id, transform: `translate(${x} ${y})` }, this.svg);
    make("path", { class: "mark", d: MARKS[mark], fill: colour }, g);
    if (point.tie) make("circle", { class: "tie", r: 9.5 }, g);
    if (point.chosen) make("circle", { class: "chosen", r: 12.5 }, g);
  }

  /** @param {PlanPoint} point @param {import("../types").NamePlace | undefined} place */
  drawName(point, place) {
    if (!place) return;
    const [x, y] = this.place(point);
    const [right, down, joined] = place;
    // a dot at the point itself: marks and rings hide where a bare line ends
    if (joined) make("path", { class: "leader", d: `M${x} ${y}l${right} ${down}` }, this.svg);
    if (joined) make("circle", { cx: x, cy: y, r: 2 }, this.svg);
    const side = right > 0 ? "start" : "end";
    make("text", { class: "name", x: x + right, y: y + down + 4.5, "text-anchor": side }, this.svg, point.name);
  }
}

/**
 * An entry of the legend.
 * @param {string} words
 * @param {Record<string, string>} look
 */
function entry(words, look) {
  const item = document.createElement("li");
  make("path", look, make("svg", { viewBox: "-8 -8 16 16" }, item));
  item.append(words);
  return item;
}
