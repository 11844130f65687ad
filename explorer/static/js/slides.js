// Slides: one at a time, turned by buttons, arrow keys, space or the page keys; the address keeps the place.

import { films } from "./film.js";

const all = [...document.querySelectorAll(".slide")];
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
  end = films(all[here]);
  if (at) at.textContent = `${here + 1} of ${all.length}`;
  history.replaceState(null, "", `#${here + 1}`);
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
  if (!(e.key in turns) || (e.key === " " && e.target instanceof HTMLButtonElement)) return;
  e.preventDefault();
  turnTo(turns[e.key]());
});
back?.addEventListener("click", () => turnTo(here - 1));
next?.addEventListener("click", () => turnTo(here + 1));
turnTo(Number(location.hash.slice(1)) - 1 || 0);
