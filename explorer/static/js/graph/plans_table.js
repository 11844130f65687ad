// Plans, points of a sweep or runs as a table: a row is chosen by a click or by the keys; a head sorts.

/** @typedef {import("../types").PlanRow} PlanRow */
/** @typedef {import("../types").PlanCell} PlanCell */

/** @type {WeakMap<Element, string>} */
const shown = new WeakMap();

/**
 * An element with a class and text.
 * @param {string} tag
 * @param {string} kind
 * @param {string} [text]
 */
function part(tag, kind, text) {
  const box = document.createElement(tag);
  if (kind) box.className = kind;
  if (text) box.textContent = text;
  return box;
}

/**
 * @param {NonNullable<PlanCell["bar"]>} parts
 * @param {boolean} cut
 */
function bar(parts, cut) {
  const box = part("span", cut ? "bar cut" : "bar");
  for (const [name, share, words] of parts) {
    const piece = part("i", `p-${name.replace(" ", "-")}`);
    piece.style.width = `${100 * share}%`;
    piece.title = words;
    box.append(piece);
  }
  return box;
}

/** @param {NonNullable<PlanCell["memory"]>} memory */
function filling([filled, likely, over]) {
  const box = part("span", over ? "mem over" : "mem");
  const held = part("b", "");
  const more = part("em", "");
  held.style.width = `${100 * filled}%`;
  more.style.left = `${100 * filled}%`;
  more.style.width = `${100 * Math.max(0, likely - filled)}%`;
  box.append(held, more);
  return box;
}

/**
 * A cell of figures: what is drawn above, the figure, and what bounds it below.
 * @param {string} label
 * @param {PlanCell} data
 * @param {boolean} drawn whether the row has a drawing, above which figures of other cells leave room
 */
function cell(label, data, drawn) {
  const box = part("td", "");
  // for a phone, where each row is a card of narrow cells, without the head
  box.dataset.label = label;
  if (data.bar) box.append(bar(data.bar, data.cut ?? false));
  else if (data.memory) box.append(filling(data.memory));
  else if (drawn) box.append(part("span", "none"));
  const below = Object.assign(part("small", "", data.below), { title: data.hover ?? "" });
  const figure = part("strong", "", data.figure);
  if (data.unit) figure.dataset.unit = data.unit;
  if (data.belowUnit) below.dataset.unit = data.belowUnit;
  box.append(figure, below);
  return box;
}

/**
 * An element with text in which each word that is defined shows its meaning on hover.
 * @param {string} tag
 * @param {string} text
 * @param {Record<string, string>} terms
 */
function defined(tag, text, terms) {
  const box = part(tag, "");
  const words = Object.keys(terms).sort((a, b) => b.length - a.length);
  for (const piece of words.length ? text.split(new RegExp(`\\b(${words.join("|")})\\b`)) : [text]) {
    if (terms[piece]) box.append(Object.assign(part("abbr", "", piece), { title: terms[piece] }));
    else box.append(piece);
  }
  return box;
}

/**
 * @param {PlanRow} row
 * @param {import("../types").PlansData} data
 * @param {(id: string) => void} choose
 */
function line(row, data, choose) {
  const box = part("tr", row.fits ? "" : "unfit");
  const head = part("th", "");
  head.setAttribute("scope", "row");
  const name = defined("button", row.name, data.terms);
  name.setAttribute("type", "button");
  name.setAttribute("aria-description", row.what); // rows may have one name
  // a plan's or a run's name says what it is, a value of a sweep does not
  if (!["plan", "run"].includes(data.first)) head.dataset.label = data.first;
  head.append(name, defined("small", row.what.replaceAll(" %", "\u00a0%"), data.terms));
  box.dataset.id = row.id;
  if (row.id === data.chosen) box.setAttribute("aria-current", "true");
  const drawn = row.cells.some((one) => one.bar || one.memory);
  box.append(head, ...row.cells.map((one, k) => cell(data.labels[k], one, drawn)));
  box.addEventListener("click", () => choose(row.id));
  return box;
}

/**
 * The head of a column, whose button sorts the rows by it: upwards, then downwards.
 * @param {string} title
 * @param {number} column
 * @param {HTMLTableElement} table
 * @param {import("../types").PlansData} data
 */
function sorter(title, column, table, { rows, terms }) {
  const box = Object.assign(part("th", ""), { scope: "col" });
  const button = defined("button", title.replace("; ", ";\n"), terms);
  button.setAttribute("type", "button");
  button.addEventListener("click", () => {
    const down = box.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead?.rows[0].cells ?? []) other.removeAttribute("aria-sort");
    box.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = new Map(rows.map((row) => [row.id, row.cells[column].order * (down ? -1 : 1)]));
    const lines = [...table.tBodies[0].rows];
    lines.sort((a, b) => (order.get(a.dataset.id ?? "") ?? 0) - (order.get(b.dataset.id ?? "") ?? 0));
    table.tBodies[0].append(...lines);
  });
  box.append(button);
  return box;
}

/** @param {import("../types").Component<import("../types").PlansData>} component */
export default function ({ data, parentElement, setStateValue }) {
  const box = parentElement.querySelector(".plans");
  if (!box) return;
  const text = JSON.stringify(data);
  if (shown.get(box) === text) return;
  shown.set(box, text);
  const table = document.createElement("table");
  table.setAttribute("aria-label", data.label);
  table
    .createTHead()
    .insertRow()
    .append(
      Object.assign(part("th", "", data.first), { scope: "col" }),
      ...data.head.map((title, k) => sorter(title, k, table, data)),
    );
  /** @param {string} id */
  const choose = (id) => {
    for (const row of table.tBodies[0].rows) row.removeAttribute("aria-current");
    const row = [...table.tBodies[0].rows].find((one) => one.dataset.id === id);
    row?.setAttribute("aria-current", "true"); // at once; Python follows
    setStateValue("chosen", { at: Date.now(), id });
  };
  table.createTBody().append(...data.rows.map((row) => line(row, data, choose)));
  const had = parentElement instanceof ShadowRoot && parentElement.activeElement?.textContent;
  box.replaceChildren(table);
  if (had) for (const b of box.querySelectorAll("button")) if (b.textContent === had) b.focus();
}
