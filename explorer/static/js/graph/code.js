// The generated code of a plan. The line that the pointer is on outlines its node in the graph beside it, and the other way round.

import { point, whenPointed } from "./pointed.js";

/** @typedef {import("../types").CodeData} CodeData */

/** @type {WeakMap<Element, string>} */
const written = new WeakMap();
/** @type {WeakMap<Element, () => void>} */
const following = new WeakMap();
const AWAY = new Map([
  ["ArrowDown", 1],
  ["ArrowUp", -1],
]);

/**
 * One line; an empty one keeps its height.
 * @param {CodeData["lines"][number]} item
 */
function lineOf({ text, nodes, head }) {
  const line = document.createElement("div");
  line.textContent = text || " ";
  line.className = nodes.length ? "line linked" : "line";
  line.classList.toggle("head", head);
  line.dataset.nodes = JSON.stringify(nodes);
  return line;
}

/**
 * The nodes of a line; the last one is that of the operator that makes the line's result.
 * @param {HTMLElement} line
 * @returns {string[]}
 */
function nodesOf(line) {
  return JSON.parse(line.dataset.nodes || "[]");
}

/**
 * Mark the lines of a node, and bring the first into the window of the code, unless the pointer is in it.
 * @param {HTMLElement} box
 * @param {string} id
 */
function mark(box, id) {
  let first = true;
  for (const line of /** @type {NodeListOf<HTMLElement>} */ (box.querySelectorAll(".line"))) {
    const on = !!id && nodesOf(line).includes(id);
    line.classList.toggle("hinted", on);
    if (on && first && !box.matches(":hover, :focus")) {
      const above = line.offsetTop < box.scrollTop;
      if (above || line.offsetTop + line.offsetHeight > box.scrollTop + box.clientHeight)
        box.scrollTop = Math.max(0, line.offsetTop - box.clientHeight / 3);
    }
    first = first && !on;
  }
}

/**
 * Arrow keys walk the lines that have a node.
 * @param {HTMLElement} box
 * @param {KeyboardEvent} event
 */
function walk(box, event) {
  const step = AWAY.get(event.key);
  const lines = /** @type {HTMLElement[]} */ ([...box.querySelectorAll(".linked")]);
  if (!step || !lines.length) return;
  event.preventDefault();
  const at = lines.findIndex((line) => line.classList.contains("at"));
  const next = lines[at < 0 ? 0 : (at + step + lines.length) % lines.length];
  lines[at]?.classList.remove("at");
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest" });
  point(nodesOf(next).at(-1) ?? "");
}

/** @param {HTMLElement} box */
function listen(box) {
  if (following.has(box)) return;
  following.set(
    box,
    whenPointed((id) => mark(box, id)),
  );
  box.onpointerover = (event) => {
    const line = event.target instanceof Element ? event.target.closest(".line") : null;
    if (line instanceof HTMLElement) point(nodesOf(line).at(-1) ?? "");
  };
  box.onpointerleave = () => point("");
  box.onblur = () => {
    box.querySelector(".at")?.classList.remove("at");
    point("");
  };
  box.onkeydown = (event) => walk(box, event);
}

/** @param {import("../types").Component<CodeData>} component */
export default function ({ data, parentElement }) {
  const box = parentElement.querySelector(".code");
  if (!(box instanceof HTMLElement)) return undefined;
  const text = JSON.stringify(data);
  listen(box);
  const leave = () => {
    following.get(box)?.();
    following.delete(box);
  };
  if (written.get(box) === text) return leave;
  written.set(box, text);
  box.setAttribute("aria-label", data.label);
  box.style.height = `${data.height}px`;
  box.replaceChildren(...data.lines.map(lineOf));
  const first = /** @type {HTMLElement | null} */ (box.querySelectorAll(".line")[data.first]);
  if (first) box.scrollTop = first.offsetTop;
  return leave;
}
