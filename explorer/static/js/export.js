// An exported lesson: cases, steps with a scrubber, a question before the reveal. Everything is in the page.

import { alive } from "./alive.js";

/**
 * The element of this id, which the page has.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
function at(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page lacks ${id}`);
  return found;
}

/** @type {{ cases: import("./types").Case[], start: number }} */
const { cases, start } = JSON.parse(at("data", HTMLElement).textContent ?? "");
const slider = at("slider", HTMLInputElement);
const chosen = at("case", HTMLSelectElement);
const back = at("back", HTMLButtonElement);
const next = at("next", HTMLButtonElement);
const picture = at("picture", HTMLElement);
const why = at("why", HTMLElement);
const show = at("show", HTMLElement);

let current = start;
let step = 0;
let revealed = false;
let end = () => {};

function last() {
  const { steps, reveal } = cases[current];
  return (revealed ? steps.length : reveal) - 1;
}

function draw() {
  const { steps, note } = cases[current];
  step = Math.max(0, Math.min(step, last()));
  at("step", HTMLElement).textContent = `${step + 1} of ${steps.length}: ${steps[step].title}`;
  at("says", HTMLElement).innerHTML = steps[step].says;
  end();
  picture.innerHTML = steps[step].picture;
  end = alive(picture);
  picture.classList.remove("turned");
  void picture.offsetWidth; // start the animation again
  picture.classList.add("turned");
  at("note", HTMLElement).textContent = note;
  slider.max = String(last() + 1);
  slider.value = String(step + 1);
  back.disabled = step === 0;
  next.disabled = step === last();
  at("question", HTMLElement).hidden = !revealed && step < last();
}

/** @param {number} by */
function turn(by) {
  step += by;
  draw();
}

function ask() {
  const { question } = cases[current];
  revealed = false;
  at("ask", HTMLElement).innerHTML = question.ask;
  why.textContent = "";
  show.hidden = false;
  const labels = question.options.map((text, i) => {
    const label = document.createElement("label");
    const input = document.createElement("input");
    const words = document.createElement("span");
    Object.assign(input, { type: "radio", name: "option" });
    input.addEventListener("change", () => answer(i));
    words.innerHTML = ` ${text}`;
    label.append(input, words);
    return label;
  });
  at("options", HTMLElement).replaceChildren(...labels);
}

/** @param {number} i */
function answer(i) {
  const { question } = cases[current];
  const right = i === question.answer;
  why.innerHTML = `<strong>${right ? "Right." : "Not quite."}</strong> ${question.why[i]}`;
  if (right) showRest();
}

function showRest() {
  revealed = true;
  show.hidden = true;
  draw();
}

chosen.replaceChildren(...cases.map((c, i) => new Option(c.name || "as it was", String(i))));
chosen.value = String(start);
at("choose", HTMLElement).hidden = cases.length < 2;
chosen.addEventListener("change", () => {
  current = Number(chosen.value);
  ask();
  draw();
});
slider.addEventListener("input", () => {
  step = Number(slider.value) - 1;
  draw();
});
back.addEventListener("click", () => turn(-1));
next.addEventListener("click", () => turn(1));
show.addEventListener("click", showRest);
document.addEventListener("keydown", (e) => {
  if (e.target instanceof HTMLElement && ["INPUT", "SELECT"].includes(e.target.tagName)) return;
  if (e.key === "ArrowLeft") turn(-1);
  if (e.key === "ArrowRight") turn(1);
});
ask();
draw();
