// An exported lesson: cases, steps with a scrubber, a question before the reveal. Everything is in the page.

import { alive } from "./pictures/alive.js";

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

/** @type {{ cases: import("../types").Case[], start: number }} */
const { cases, start } = JSON.parse(at("data", HTMLElement).textContent ?? "");
const slider = at("slider", HTMLInputElement);
const chosen = at("case", HTMLSelectElement);
const back = at("back", HTMLButtonElement);
const next = at("next", HTMLButtonElement);
const picture = at("picture", HTMLElement);
const why = at("why", HTMLElement);
const show = at("show", HTMLElement);

const wanted = new URLSearchParams(location.hash.slice(1)); // #step=3&with=n:6
const named = wanted.get("with") ? cases.findIndex((c) => c.with === wanted.get("with")) : -1;
let current = named < 0 ? start : named;
let step = Number(wanted.get("step") ?? 1) - 1 || 0;
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
  end = alive(picture, () => {
    at("note", HTMLElement).textContent =
      "You changed the picture. The other steps and the question are about the case as it was.";
  });
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
  at("options", HTMLElement).replaceChildren(...question.options.map(option));
}

/**
 * @param {string} text markup made and escaped in Python
 * @param {number} i
 */
function option(text, i) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  const words = document.createElement("span");
  Object.assign(input, { type: "radio", name: "option", value: String(i) });
  words.innerHTML = ` ${text}`;
  label.append(input, words);
  return label;
}

at("answer", HTMLFormElement).addEventListener("submit", (e) => {
  e.preventDefault();
  const { question } = cases[current];
  const given = new FormData(at("answer", HTMLFormElement)).get("option");
  if (given === null) {
    why.textContent = "Choose one of them first.";
    return;
  }
  const right = Number(given) === question.answer;
  const head = document.createElement("strong");
  const rest = document.createElement("span");
  head.textContent = right ? "Right. " : "Not quite. ";
  rest.innerHTML = question.why[Number(given)];
  why.replaceChildren(head, rest);
  if (right) showRest();
});

function showRest() {
  revealed = true;
  show.hidden = true;
  draw();
}

chosen.replaceChildren(...cases.map((c, i) => new Option(c.name || "as it was", String(i))));
chosen.value = String(current);
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
