// A table of weights: placements as chips, each name a button that opens the weight's node in the graph.

import { point, whenPointed } from "./pointed.js";

/** @typedef {Record<string, string>} Told Words and what they mean. */

/** @type {WeakMap<Element, string>} */
const shown = new WeakMap();
/** @type {WeakMap<Element, () => void>} */
const listening = new WeakMap();

/**
 * A placement letter on its colour.
 * @param {string} letter
 * @param {Told} told
 */
function chip(letter, told) {
  const mark = document.createElement("span");
  mark.className = `chip ${letter[0]}`;
  mark.textContent = letter;
  mark.title = told[letter[0]] || "";
  return mark;
}

/**
 * Words that are defined get their meaning on hover.
 * @param {string} text
 * @param {Told} told
 */
function word(text, told) {
  const meaning = told[text.trim()];
  return meaning ? Object.assign(document.createElement("span"), { textContent: text, title: meaning }) : text;
}

/**
 * A long name breaks after its dots, not within a word.
 * @param {string} text
 */
function breakable(text) {
  return text.split(/(?<=[._])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
}

/**
 * One cell, of one part or several.
 * @param {import("../types").CellPart | import("../types").CellPart[]} content
 * @param {Told} told
 * @param {"td" | "th"} tag
 */
function cell(content, told, tag = "td") {
  const box = document.createElement(tag);
  for (const part of [content].flat()) {
    const placed = part !== null && typeof part === "object";
    box.append(placed ? chip(part.chip, told) : word(String(part ?? ""), told));
  }
  return box;
}

/**
 * The name of a weight; a button where its node can be shown.
 * @param {import("../types").WeightRow} item
 * @param {(node: string) => void} open
 */
function nameCell(item, open) {
  const box = document.createElement("th");
  box.scope = "row";
  if (item.node) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...breakable(item.name));
    button.title = "Show in the graph";
    button.addEventListener("click", () => open(item.node));
    box.append(button);
  } else box.append(...breakable(item.name));
  if (item.times) box.append(` ×${item.times}`);
  return box;
}

/**
 * One weight.
 * @param {import("../types").WeightRow} item
 * @param {Told} told
 * @param {(node: string) => void} open
 */
function row(item, told, open) {
  const line = document.createElement("tr");
  line.append(nameCell(item, open), ...item.cells.map((content) => cell(content, told)));
  if (item.picked) line.setAttribute("aria-current", "true");
  line.dataset.node = item.node || "";
  for (const come of ["pointerenter", "focusin"]) line.addEventListener(come, () => point(item.node || ""));
  for (const go of ["pointerleave", "focusout"]) line.addEventListener(go, () => point(""));
  return line;
}

/**
 * What the pointer is on in a graph of the page is outlined in this table.
 * @param {Element} box
 */
function listen(box) {
  if (listening.has(box)) return;
  const end = whenPointed((id) => {
    for (const line of box.querySelectorAll("tr[data-node]")) {
      const own = /** @type {HTMLElement} */ (line).dataset.node;
      line.classList.toggle("hinted", !!id && own === id);
    }
  });
  listening.set(box, end);
}

/** @param {import("../types").Component<import("../types").WeightsData>} component */
export default function ({ data, parentElement, setTriggerValue }) {
  const box = parentElement.querySelector(".weights");
  if (!box) return undefined;
  const text = JSON.stringify(data);
  listen(box);
  const leave = () => {
    listening.get(box)?.();
    listening.delete(box);
  };
  if (shown.get(box) === text) return leave;
  shown.set(box, text);
  const table = document.createElement("table");
  table.setAttribute("aria-label", data.label);
  const head = table.createTHead().insertRow();
  head.append(...data.head.map((title) => Object.assign(cell(title, data.told, "th"), { scope: "col" })));
  const body = table.createTBody();
  body.append(...data.rows.map((item) => row(item, data.told, (node) => setTriggerValue("open", node))));
  box.replaceChildren(table);
  return leave;
}
