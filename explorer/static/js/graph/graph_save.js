// The drawing as a file: SVG with the page's colours written into it.

import { find } from "./graph_draw.js";
import { make, SVG } from "./svg_make.js";

/** @typedef {import("./graph_draw.js").Drawing & { place(): void }} Saved */

const KEPT = [
  "fill",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "font-family",
  "font-size",
  "font-weight",
  "text-anchor",
  "opacity",
  "marker-end",
];

/**
 * The drawing as it stands, whole, with the page's colours and fonts written into it.
 * @param {Saved} graph
 */
function still(graph) {
  graph.world.classList.remove("far");
  const key = drawKey(graph);
  const box = graph.world.getBBox();
  const copy = /** @type {SVGSVGElement} */ (graph.canvas.cloneNode(true));
  const parts = copy.querySelectorAll("*");
  graph.canvas.querySelectorAll("*").forEach((element, i) => {
    const style = getComputedStyle(element);
    const part = /** @type {SVGElement} */ (parts[i]);
    for (const name of KEPT) part.style.setProperty(name, style.getPropertyValue(name));
  });
  key.remove();
  const world = find(copy, ".world", SVGGElement);
  world.removeAttribute("transform");
  const size = { width: Math.ceil(box.width + 32), height: Math.ceil(box.height + 32) };
  copy.setAttribute("viewBox", [box.x - 16, box.y - 16, size.width, size.height].join(" "));
  copy.setAttribute("width", String(size.width));
  copy.setAttribute("height", String(size.height));
  copy.setAttribute("xmlns", SVG);
  const paper = getComputedStyle(find(graph.root, ".graph", HTMLElement)).backgroundColor;
  copy.insertBefore(make("rect", { x: box.x - 16, y: box.y - 16, ...size, fill: paper }), world);
  graph.place();
  return { text: new XMLSerializer().serializeToString(copy), ...size };
}

/**
 * The legend below the drawing, one entry a line, the shades of a scale beside each other; empty without entries.
 * @param {Saved} graph
 */
function drawKey(graph) {
  const { x: left, y, height } = graph.world.getBBox();
  const keys = graph.keys();
  if (!keys.length) return make("g", { class: "key" });
  const g = make("g", { class: "key" }, graph.world);
  let x = left;
  let top = y + height + 30;
  for (const entry of [{ text: graph.scene.title }, ...keys]) {
    const { mark, text } = entry;
    if (mark !== "shade" && x > left) {
      x = left;
      top += 20;
    }
    drawMark(graph, g, entry, x, top);
    const lines = broken(text).map((line, i) => make("text", { x: mark ? x + 30 : x, y: top + 16 * i }, g, line));
    if (mark === "shade") x += 48 + lines[0].getComputedTextLength();
    else top += 4 + 16 * lines.length;
  }
  return g;
}

/**
 * Words in lines that the fonts of other programs, which may be wider, still keep inside most drawings.
 * @param {string} text
 */
function broken(text, most = 64) {
  /** @type {string[]} */
  const lines = [];
  for (const word of text.split(" ")) {
    const last = lines.at(-1);
    if (last === undefined || last.length + word.length >= most) lines.push(word);
    else lines[lines.length - 1] = `${last} ${word}`;
  }
  return lines;
}

/**
 * The mark of one entry of the legend, with its left end at x and its foot at y.
 * @param {Saved} graph
 * @param {SVGGElement} g
 * @param {import("../types").LegendKey} entry
 * @param {number} x
 * @param {number} y
 */
function drawMark(graph, g, { mark, fill }, x, y) {
  const box = { x, y: y - 9, width: 22, height: 10 };
  const draw = {
    grey: () => make("rect", { ...box, class: "whole" }, g),
    sharded: () => make("rect", { ...box, fill: "#b2d5ea", stroke: "#3f93c7" }, g),
    split: () => make("rect", { ...box, fill: "#f6ddae", stroke: "#c98a00" }, g),
    slices: () =>
      graph.data.devices.slice(0, 4).forEach((colour, i) => {
        make("rect", { ...box, x: x + i * 5.5, width: 5, fill: colour }, g);
      }),
    shade: () => make("rect", { ...box, class: "swatch", style: `fill: ${fill}` }, g),
    line: () => {
      const d = `M${x},${y - 4}L${x + 22},${y - 4}`;
      make("path", { class: "wire sends", style: "marker-end: none; stroke-width: 4", d }, g);
    },
    bare: () => {
      const b = make("g", { class: "bare" }, g);
      make("rect", { x: x + 4, y: y - 12, width: 14, height: 16, rx: 3 }, b);
      make("text", { x: x + 11, y: y + 0.5 }, b, "!");
    },
  };
  if (mark) draw[mark]();
}

/**
 * Give the browser a file to keep.
 * @param {Saved} graph
 * @param {Blob} blob
 * @param {string} suffix
 */
function keep(graph, blob, suffix) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${graph.scene.title}.${suffix}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** @param {Saved} graph */
export function saveSvg(graph) {
  keep(graph, new Blob([still(graph).text], { type: "image/svg+xml" }), "svg");
}
