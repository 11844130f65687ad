// One picture of a lesson: markup made and escaped in Python. Only a changed picture is drawn anew.

import { films } from "./film.js";

/** @type {WeakMap<Element, () => void>} */
const ends = new WeakMap();
/** @type {WeakMap<Element, string>} */
const shown = new WeakMap();

/** @param {import("./types").Component<{ picture: string }>} component */
export default function ({ data, parentElement }) {
  const box = parentElement.querySelector(".lesson");
  if (!(box instanceof HTMLElement) || shown.get(box) === data.picture) return;
  const first = !shown.has(box);
  shown.set(box, data.picture);
  ends.get(box)?.();
  box.innerHTML = data.picture;
  ends.set(box, films(box));
  box.classList.toggle("turned", !first);
  if (!first) {
    box.style.animation = "none";
    void box.offsetWidth; // start the animation again
    box.style.animation = "";
  }
}
