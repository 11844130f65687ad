// Keys: the files that students saved are opened here and marked. Nothing is sent.

import { judged } from "./answers.js";
import { save } from "./save.js";

/** @type {{ asked: Record<string, import("../types").Asked>, former: Record<string, string> }} */
const { asked: keys, former } = JSON.parse(document.getElementById("data")?.textContent ?? "{}");
const files = /** @type {HTMLInputElement} */ (document.getElementById("files"));
const marks = /** @type {HTMLElement} */ (document.getElementById("marks"));
const csv = /** @type {HTMLButtonElement} */ (document.getElementById("table"));
const told = document.getElementById("told");

/** @typedef {{ name: string, given: string, mark: string, why: string }} Mark */
/** @type {{ who: string, marks: Mark[] }[]} */
let marked = [];

/** @param {string} markup made and escaped in Python */
function words(markup) {
  const box = document.createElement("span");
  box.innerHTML = markup;
  return (box.textContent ?? "").trim();
}

/**
 * The name of an exercise; older files have numbers.
 * @param {string} name
 */
const current = (name) => former[name] ?? name;

/**
 * @param {string} name of the exercise
 * @param {unknown} given
 * @returns {Mark}
 */
function markOf(name, given) {
  const asked = keys[name];
  if (typeof given !== "string") return { name, given: "", mark: "open", why: "" };
  const chosen = asked.options.findIndex((option) => words(option) === given);
  const [at, why] = asked.values.length ? judged(asked, given) : [chosen, asked.why[chosen] ?? "Not an option of it."];
  return { name, given, mark: at === asked.answer ? "right" : "wrong", why: words(why) };
}

/**
 * A row of cells; the first is its head.
 * @param {string[]} texts
 */
function row(texts) {
  const made = document.createElement("tr");
  for (const text of texts) {
    const cell = document.createElement(made.children.length ? "td" : "th");
    cell.textContent = text;
    made.append(cell);
  }
  return made;
}

/** @param {{ who: string, marks: Mark[] }} one */
function drawn({ who, marks: all }) {
  const box = document.createElement("details");
  const head = document.createElement("summary");
  const table = document.createElement("table");
  const right = all.filter((m) => m.mark === "right").length;
  const open = all.filter((m) => m.mark === "open").length;
  head.textContent = `${who}: ${right} of ${all.length} right, ${open} open`;
  table.append(...all.filter((m) => m.mark !== "open").map((m) => row([m.name, m.mark, m.given, m.why])));
  box.append(head, table);
  return box;
}

files.addEventListener("change", async () => {
  marked = [];
  const refused = [];
  for (const file of files.files ?? []) {
    try {
      const { name, answers, task } = JSON.parse(await file.text());
      const given = Object.fromEntries(Object.entries(answers).map(([key, text]) => [current(key), text]));
      const asked = typeof task === "string" ? task.split(",").map(current) : Object.keys(keys);
      const all = asked.filter((key) => key in keys).map((key) => markOf(key, given[key]));
      marked.push({ who: String(name || file.name), marks: all });
    } catch {
      refused.push(file.name);
    }
  }
  marked.sort((a, b) => a.who.localeCompare(b.who));
  marks.replaceChildren(...marked.map(drawn));
  csv.hidden = !marked.length;
  if (told)
    told.textContent = refused.length
      ? `Not a file of saved answers: ${refused.join(", ")}.`
      : `${marked.length} marked.`;
});

csv.addEventListener("click", () => {
  /** @param {string} text */
  const quoted = (text) => `"${text.replace(/^([=+@-])/, "'$1").replaceAll('"', '""')}"`;
  const head = ["name", "right", ...Object.keys(keys)];
  const rows = marked.map(({ who, marks: all }) => [
    who,
    String(all.filter((m) => m.mark === "right").length),
    ...Object.keys(keys).map((key) => ({ right: "1", wrong: "0" })[all.find((m) => m.name === key)?.mark ?? ""] ?? ""),
  ]);
  save([head, ...rows].map((cells) => cells.map(quoted).join(",")).join("\n"), "text/csv", "marks.csv");
});
