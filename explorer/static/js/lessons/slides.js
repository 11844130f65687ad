// Slides: one at a time, turned by buttons, arrow keys, space or the page keys; the address keeps the place.

import { alive } from "./pictures/alive.js";

const only = new URLSearchParams(location.search).get("lessons")?.split(",");
for (const slide of document.querySelectorAll(".slide[data-lesson]"))
  if (only && !only.includes(/** @type {HTMLElement} */ (slide).dataset.lesson ?? "")) slide.remove();
for (const link of document.querySelectorAll(".contents [data-to]"))
  if (only && !only.includes(/** @type {HTMLElement} */ (link).dataset.to ?? "")) link.closest("li")?.remove();

const all = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".slide")]);
const at = document.getElementById("at");
const back = document.getElementById("back");
const next = document.getElementById("next");
let here = 0;
let end = () => {};

/** @param {number} to */
function turnTo(to) {
  end();
  for (const bar of all[here].querySelectorAll(".film .bar")) bar.remove();
  all[here].classList.remove("here");
  here = Math.max(0, Math.min(to, all.length - 1));
  all[here].classList.add("here");
  end = alive(all[here]);
  if (at) at.textContent = `${here + 1} of ${all.length}`;
  history.replaceState(null, "", `#${here + 1}`);
}

/** The slide that the address names: its number, or the first of a lesson. */
function named() {
  const lesson = new URLSearchParams(location.hash.slice(1)).get("lesson");
  return lesson ? all.findIndex((slide) => slide.dataset.lesson === lesson) : Number(location.hash.slice(1)) - 1 || 0;
}

/** @type {Record<string, () => number>} */
const turns = {
  ArrowRight: () => here + 1,
  PageDown: () => here + 1,
  " ": () => here + 1,
  ArrowLeft: () => here - 1,
  PageUp: () => here - 1,
  Home: () => 0,
  End: () => all.length - 1,
};
document.addEventListener("keydown", (e) => {
  const busy = e.target instanceof Element && e.target.closest("input, select, .film, .builder, .sketch .handle");
  const pressed = e.key === " " && e.target instanceof Element && e.target.closest("button, a");
  if (!(e.key in turns) || busy || pressed || e.altKey || e.ctrlKey || e.metaKey) return;
  e.preventDefault();
  turnTo(turns[e.key]());
});
back?.addEventListener("click", () => turnTo(here - 1));
next?.addEventListener("click", () => turnTo(here + 1));
window.addEventListener("hashchange", () => turnTo(named()));
turnTo(named());
