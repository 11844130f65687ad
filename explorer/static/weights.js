// A table of weights: placements as chips, each name a button that opens the weight's node in the graph.
const shown = new WeakMap();

function chip(letter, told) {
  const mark = document.createElement("span");
  mark.className = `chip ${letter[0]}`;
  mark.textContent = letter;
  mark.title = told[letter[0]] || "";
  return mark;
}

// Words that are defined get their meaning on hover.
function word(text, told) {
  const meaning = told[text.trim()];
  return meaning ? Object.assign(document.createElement("span"), { textContent: text, title: meaning }) : text;
}

// A long name breaks after its dots, not within a word.
function breakable(text) {
  return text.split(/(?<=[._])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
}

function cell(content, told, tag = "td") {
  const box = document.createElement(tag);
  for (const part of [content].flat()) box.append(part && part.chip ? chip(part.chip, told) : word(String(part ?? ""), told));
  return box;
}

function row(item, told, open) {
  const line = document.createElement("tr");
  const first = document.createElement("th");
  first.scope = "row";
  if (item.node) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...breakable(item.name));
    button.title = "Show in the graph";
    button.addEventListener("click", () => open(item.node));
    first.append(button);
  } else first.append(...breakable(item.name));
  if (item.times) first.append(` ×${item.times}`);
  line.append(first, ...item.cells.map((c) => cell(c, told)));
  if (item.picked) line.setAttribute("aria-current", "true");
  line.dataset.node = item.node || "";
  for (const come of ["pointerenter", "focusin"]) line.addEventListener(come, () => point(item.node || ""));
  for (const go of ["pointerleave", "focusout"]) line.addEventListener(go, () => point(""));
  return line;
}

// What the pointer or the focus is on is outlined in the graphs of the page, and a node there in this table.
function point(node) {
  window.dispatchEvent(new CustomEvent("shardscope:node", { detail: node }));
}

const listening = new WeakMap();

function listen(box) {
  if (listening.has(box)) return;
  const hint = ({ detail }) => { for (const line of box.querySelectorAll("tr[data-node]")) line.classList.toggle("hinted", !!detail && line.dataset.node === detail); };
  listening.set(box, hint);
  window.addEventListener("shardscope:node", hint);
}

export default function ({ data, parentElement, setTriggerValue }) {
  const box = parentElement.querySelector(".weights");
  const text = JSON.stringify(data);
  listen(box);
  const leave = () => { window.removeEventListener("shardscope:node", listening.get(box)); listening.delete(box); };
  if (shown.get(box) === text) return leave;
  shown.set(box, text);
  const table = document.createElement("table");
  table.setAttribute("aria-label", data.label);
  const head = table.createTHead().insertRow();
  head.append(...data.head.map((h) => Object.assign(cell(h, data.told, "th"), { scope: "col" })));
  const body = table.createTBody();
  body.append(...data.rows.map((r) => row(r, data.told, (node) => setTriggerValue("open", node))));
  box.replaceChildren(table);
  return leave;
}
