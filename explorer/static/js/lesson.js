// One picture of a lesson: markup made and escaped in Python. Only a changed picture is drawn anew.

import { alive } from "./alive.js";

/** @type {WeakMap<Element, () => void>} */
const ends = new WeakMap();
/** @type {WeakMap<Element, string>} */
const shown = new WeakMap();

/** @param {import("./types").Component<{ picture: string }>} component */
export default function ({ data, parentElement, setTriggerValue }) {
  const box = parentElement.querySelector(".lesson");
  if (!(box instanceof HTMLElement) || shown.get(box) === data.picture) return;
  const first = !shown.has(box);
  shown.set(box, data.picture);
  ends.get(box)?.();
  const built = box.querySelector(".builder") !== null;
  const focused = /** @type {SVGElement | null} */ (parentElement.activeElement)?.dataset;
  box.innerHTML = data.picture;
  ends.set(
    box,
    alive(box, (chosen) => setTriggerValue("set", chosen)),
  );
  if (built && box.querySelector(".builder")) {
    const again = `[data-key="${focused?.key}"], [data-cut="${focused?.cut}"]`;
    /** @type {SVGElement | null} */ (box.querySelector(again))?.focus();
    return; // the same picture, changed: it does not come in anew
  }
  box.classList.toggle("turned", !first);
  if (!first) {
    box.style.animation = "none";
    void box.offsetWidth; // start the animation again
    box.style.animation = "";
  }
}
