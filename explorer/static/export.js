// An exported lesson: cases, steps with a scrubber, a question before the reveal. Everything is in the page.
const { cases, start } = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
let current = start, step = 0, open = false;

function last() {
  const { steps, reveal } = cases[current];
  return (open ? steps.length : reveal) - 1;
}

function draw() {
  const { steps, note } = cases[current];
  step = Math.max(0, Math.min(step, last()));
  at("step").textContent = `${step + 1} of ${steps.length}: ${steps[step].title}`;
  at("says").innerHTML = steps[step].says;
  const box = at("picture");
  box.innerHTML = steps[step].picture;
  box.classList.remove("turned");
  void box.offsetWidth;
  box.classList.add("turned");
  at("note").textContent = note;
  at("slider").max = last() + 1;
  at("slider").value = step + 1;
  at("back").disabled = step === 0;
  at("next").disabled = step === last();
  at("question").hidden = !open && step < last();
}

function ask() {
  const { question } = cases[current];
  open = false;
  at("ask").innerHTML = question.ask;
  at("why").textContent = "";
  at("show").hidden = false;
  at("options").replaceChildren(...question.options.map((text, i) => {
    const label = document.createElement("label"), input = document.createElement("input"), words = document.createElement("span");
    Object.assign(input, { type: "radio", name: "option" });
    input.addEventListener("change", () => answer(i));
    words.innerHTML = ` ${text}`;
    label.append(input, words);
    return label;
  }));
}

function answer(i) {
  const { question } = cases[current];
  at("why").innerHTML = `<strong>${i === question.answer ? "Right." : "Not quite."}</strong> ${question.why[i]}`;
  if (i === question.answer) reveal();
}

function reveal() {
  open = true;
  at("show").hidden = true;
  draw();
}

at("case").replaceChildren(...cases.map((c, i) => new Option(c.name || "as it was", i)));
at("case").value = start;
at("choose").hidden = cases.length < 2;
at("case").addEventListener("change", (e) => { current = Number(e.target.value); ask(); draw(); });
at("slider").addEventListener("input", (e) => { step = Number(e.target.value) - 1; draw(); });
at("back").addEventListener("click", () => { step -= 1; draw(); });
at("next").addEventListener("click", () => { step += 1; draw(); });
at("show").addEventListener("click", reveal);
document.addEventListener("keydown", (e) => {
  if (["INPUT", "SELECT"].includes(e.target.tagName)) return;
  if (e.key === "ArrowLeft") { step -= 1; draw(); }
  if (e.key === "ArrowRight") { step += 1; draw(); }
});
ask();
draw();
