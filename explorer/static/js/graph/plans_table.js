// The plans of the first page as a table: a row chooses its plan, by a click or by the keys.

/** @typedef {import("../types").PlanRow} PlanRow */

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
 * A cell of figures: what is drawn above, the figure, and what bounds it below.
 * @param {string} label
 * @param {HTMLElement} drawn
 * @param {string} figure
 * @param {string} below
 */
function cell(label, drawn, figure, below) {
  const box = part("td", "");
  box.dataset.label = label;
  box.append(drawn, part("strong", "", figure), part("small", "", below));
  return box;
}

/** @param {PlanRow} row */
function bar(row) {
  const box = part("span", "bar");
  for (const [name, share, words] of row.parts) {
    const piece = part("i", `p-${name.replace(" ", "-")}`);
    piece.style.width = `${100 * share}%`;
    piece.title = words;
    box.append(piece);
  }
  return box;
}

/** @param {PlanRow} row */
function memory(row) {
  const box = part("span", row.over ? "mem over" : "mem");
  const held = part("b", "");
  const likely = part("em", "");
  held.style.width = `${100 * row.filled}%`;
  likely.style.left = `${100 * row.filled}%`;
  likely.style.width = `${100 * Math.max(0, row.likely - row.filled)}%`;
  box.append(held, likely);
  return box;
}

/**
 * @param {PlanRow} row
 * @param {boolean} chosen
 * @param {(id: string) => void} choose
 */
function line(row, chosen, choose) {
  const box = part("tr", row.fits ? "" : "unfit");
  const head = part("th", "");
  const name = part("button", "", row.name);
  head.setAttribute("scope", "row");
  name.setAttribute("type", "button");
  head.append(name, part("small", "", row.what));
  if (chosen) box.setAttribute("aria-current", "true");
  box.append(
    head,
    cell("one step", bar(row), row.step, row.band),
    cell("sent per GPU", part("span", "none"), row.sent, row.shows),
    cell("memory per GPU", memory(row), row.memory, row.range),
  );
  box.addEventListener("click", () => choose(row.id));
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
  const head = table.createTHead().insertRow();
  for (const title of ["plan", "one step", "communication per GPU", "memory per GPU"])
    head.append(Object.assign(part("th", "", title), { scope: "col" }));
  /** @param {string} id */
  const choose = (id) => {
    for (const row of table.tBodies[0].rows) row.removeAttribute("aria-current");
    const at = data.rows.findIndex((row) => row.id === id);
    table.tBodies[0].rows[at].setAttribute("aria-current", "true"); // at once; Python follows
    setStateValue("chosen", { at: Date.now(), id });
  };
  table.createTBody().append(...data.rows.map((row) => line(row, row.id === data.chosen, choose)));
  const had = parentElement instanceof ShadowRoot && parentElement.activeElement?.textContent;
  box.replaceChildren(table);
  if (had) for (const b of box.querySelectorAll("button")) if (b.textContent === had) b.focus();
}
