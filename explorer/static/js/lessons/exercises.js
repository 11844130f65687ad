// Exercises: what was typed stays in this browser, and becomes a file for the lecturer. Nothing is sent.

import { alive } from "./pictures/alive.js";
import { save } from "./save.js";

const form = /** @type {HTMLFormElement} */ (document.getElementById("answers"));
const who = /** @type {HTMLInputElement} */ (document.getElementById("who"));
const saved = document.getElementById("saved");
const KEPT = "shardscope-exercises";

/** What was answered, by exercise: the text typed, or the words of the option. */
function answers() {
  /** @type {Record<string, string>} */
  const found = {};
  for (const field of form.querySelectorAll("input")) {
    const words = field.type === "radio" ? field.nextElementSibling?.textContent : field.value;
    if ((field.type !== "radio" || field.checked) && words && field.name) found[field.name] = words.trim();
  }
  return found;
}

/** @param {{ name: string, answers: Record<string, string> }} kept */
function restore(kept) {
  who.value = kept.name;
  for (const field of form.querySelectorAll("input")) {
    const was = kept.answers[field.name] ?? "";
    if (field.type === "radio") field.checked = field.nextElementSibling?.textContent?.trim() === was;
    else if (field.name) field.value = was;
  }
}

/** A browser may refuse to keep anything; the sheet works all the same. */
function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify({ name: who.value, answers: answers() }));
  } catch {}
}

try {
  restore(JSON.parse(localStorage.getItem(KEPT) ?? '{"name": "", "answers": {}}'));
} catch {}
alive(form);
form.addEventListener("submit", (e) => e.preventDefault());
for (const kind of ["input", "change"]) {
  form.addEventListener(kind, keep);
  who.addEventListener(kind, keep);
}
document.getElementById("over")?.addEventListener("click", () => {
  if (!confirm("Forget all answers on this sheet?")) return;
  restore({ name: "", answers: {} });
  keep();
});
document.getElementById("save")?.addEventListener("click", () => {
  const given = answers();
  const name = `answers-${who.value.trim().replace(/[^\p{L}\p{N}_-]+/gu, "-") || "anonymous"}.json`;
  save(JSON.stringify({ name: who.value, answers: given }, null, 1), "application/json", name);
  if (saved) saved.textContent = `${Object.keys(given).length} answers saved as ${name}`;
});
