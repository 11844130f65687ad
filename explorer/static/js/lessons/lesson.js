// One picture of a lesson: markup made and escaped in Python. Only a changed picture is drawn anew.

import { land, onceStill } from "./land.js";
import { alive } from "./pictures/alive.js";

/** @type {WeakMap<Element, () => void>} */
const ends = new WeakMap();
/** @type {WeakMap<Element, string>} */
const shown = new WeakMap();
/** @type {WeakMap<Element, number>} */
const answers = new WeakMap();
/** @type {WeakMap<Element, (name: "set", value: Record<string, string>) => void>} The newest way to tell the server, by picture. */
const tell = new WeakMap();

/** @param {import("../types").Component<{ picture: string, numAnswers: number }>} component */
export default function ({ data, parentElement, setTriggerValue }) {
  const box = parentElement.querySelector(".lesson");
  if (!(box instanceof HTMLElement)) return;
  tell.set(box, setTriggerValue);
  const answered = data.numAnswers > (answers.get(box) ?? data.numAnswers);
  answers.set(box, data.numAnswers);
  if (answered) onceStill(() => land(".st-key-reply"));
  if (shown.get(box) === data.picture) return;
  // a button that closes under the keys gives the focus away; it goes to the words of the step
  if (shown.has(box)) onceStill(() => document.activeElement === document.body && land(".st-key-says"));
  const first = !shown.has(box);
  shown.set(box, data.picture);
  ends.get(box)?.();
  const built = box.querySelector(".builder") !== null;
  const focused = /** @type {SVGElement | null} */ (parentElement.activeElement)?.dataset;
  box.innerHTML = data.picture;
  ends.set(
    box,
    alive(box, (chosen) => tell.get(box)?.("set", chosen)),
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
