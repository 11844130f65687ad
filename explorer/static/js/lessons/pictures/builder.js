// A block to build (explorer/learn/pictures/builder.py): a cut is dragged onto a matrix with a mouse or a finger, or both are clicked in
// turn, or a matrix is changed with the arrow keys. While a cut is held over a matrix, its cost is read from the table of all choices.

const WAIT_MS = 180; // after a change, before it is told: arrow keys may pass over a choice

const AGAIN_MS = 1500; // until it is told again, if no picture shows it; twice as long each time
const MOST_TIMES = 6;

/** @type {WeakMap<Element, string>} The cut that is picked up, by the place that the picture is drawn in. */
const picked = new WeakMap();

/**
 * What was placed and no picture of the server has shown yet, by the place that the picture is drawn in. A word that is lost while the
 * page is drawn anew is told again.
 * @type {WeakMap<Element, { chosen: Record<string, string>, times: number }>}
 */
const owed = new WeakMap();

/** @typedef {(chosen: Record<string, string>) => void} Tell Says what is placed now. */

/**
 * Bring the builders inside `root` to life; returns what stops them.
 * @param {Element} root
 * @param {Tell} [tell]
 */
export function builders(root, tell) {
  const boxes = [...root.querySelectorAll(".builder")];
  if (!boxes.length) {
    const left = owed.get(root); // another step is shown: who knows whether the last word arrived
    owed.delete(root);
    if (left) setTimeout(() => tell?.(left.chosen));
  }
  const ends = boxes.map((box) => build(root, /** @type {HTMLElement} */ (box), tell));
  return () => {
    for (const end of ends) end();
  };
}

/**
 * The numbers of a table; what cannot run is NaN.
 * @param {string | undefined} text
 */
function table(text) {
  return (text ?? "").split(",").map((v) => (v === "" ? Number.NaN : Number(v)));
}

/**
 * @param {Element} root
 * @param {HTMLElement} box
 * @param {Tell} [tell]
 */
function build(root, box, tell) {
  const letters = (box.dataset.letters ?? "").split(" ");
  const keys = (box.dataset.keys ?? "").split(" ");
  const seconds = table(box.dataset.seconds);
  const memory = table(box.dataset.memory);
  const slots = /** @type {SVGGElement[]} */ ([...box.querySelectorAll(".slot")]);
  const cuts = /** @type {HTMLButtonElement[]} */ ([...box.querySelectorAll(".cut")]);
  const count = /** @type {HTMLElement} */ (box.querySelector(".count"));
  const settled = count.textContent ?? "";
  const chosen = Object.fromEntries(
    slots.map((s) => [s.dataset.key ?? "", letters[Number(s.ariaValueNow ?? s.getAttribute("aria-valuenow"))]]),
  );
  const start = { ...chosen };
  /** @type {HTMLElement | null} */
  let ghost = null;
  let moved = false;
  let waiting = 0;
  let again = 0;
  let changed = false;

  /** @param {Record<string, string>} other */
  const shows = (other) => keys.every((key) => other[key] === chosen[key]);

  /** @param {Record<string, string>} choice */
  function cost(choice) {
    const row = keys.reduce((sum, key) => 3 * sum + letters.indexOf(choice[key]), 0);
    if (Number.isNaN(seconds[row])) return "This cannot run: a cut would not be even.";
    const ms = seconds[row] / 1e3;
    return `About ${ms.toPrecision(2)} ms of messages in a layer, and ${(memory[row] / 1e3).toPrecision(3)} GiB per layer and GPU.`;
  }

  /** @param {string} cut */
  function pick(cut) {
    picked.set(root, cut);
    for (const c of cuts) c.setAttribute("aria-pressed", String(c.dataset.cut === cut));
  }

  /**
   * @param {SVGGElement} slot
   * @param {string} letter
   */
  function place(slot, letter) {
    const key = slot.dataset.key ?? "";
    if (!letter || chosen[key] === letter) return;
    chosen[key] = letter;
    const looks = /** @type {SVGGElement[]} */ ([...slot.querySelectorAll(".look")]);
    for (const look of looks) look.style.display = look.dataset.look === letter ? "" : "none";
    const word = cuts.find((c) => c.dataset.cut === letter)?.textContent ?? letter;
    slot.setAttribute("aria-valuenow", String(letters.indexOf(letter)));
    slot.setAttribute("aria-valuetext", word);
    changed = keys.some((k) => chosen[k] !== start[k]);
    box.classList.toggle("changed", changed);
    count.textContent = changed ? cost(chosen) : settled;
    owe();
    clearTimeout(waiting);
    waiting = setTimeout(say, WAIT_MS);
  }

  function owe() {
    clearTimeout(again);
    const before = owed.get(root);
    if (tell && !(before && shows(before.chosen))) owed.set(root, { chosen: { ...chosen }, times: 0 });
  }

  function say() {
    waiting = 0;
    tell?.({ ...chosen });
    const mine = owed.get(root);
    if (!mine || mine.times >= MOST_TIMES) return;
    again = setTimeout(say, AGAIN_MS * 2 ** mine.times);
    mine.times += 1;
  }

  /**
   * The matrix below a point.
   * @param {number} x
   * @param {number} y
   */
  function below(x, y) {
    const tree = /** @type {ShadowRoot | Document} */ (box.getRootNode());
    const found = tree.elementFromPoint(x, y)?.closest(".slot");
    return found instanceof SVGGElement ? found : null;
  }

  /** @param {SVGGElement | null} slot */
  function over(slot) {
    for (const s of slots) s.classList.toggle("over", s === slot);
    const key = slot?.dataset.key;
    if (key && picked.get(root) !== chosen[key])
      count.textContent = cost({ ...chosen, [key]: picked.get(root) ?? chosen[key] });
    else count.textContent = changed ? cost(chosen) : settled;
  }

  /** @param {PointerEvent} e */
  function grab(e) {
    const cut = /** @type {HTMLButtonElement} */ (e.currentTarget);
    if (e.button !== 0) return;
    pick(cut.dataset.cut ?? "");
    moved = false;
    ghost = /** @type {HTMLElement} */ (cut.querySelector("svg")?.cloneNode(true));
    ghost.setAttribute("class", "ghost");
    cut.setPointerCapture(e.pointerId);
  }

  /** @param {PointerEvent} e */
  function drag(e) {
    if (!ghost) return;
    if (!moved) box.append(ghost);
    moved = true;
    ghost.style.left = `${e.clientX}px`;
    ghost.style.top = `${e.clientY}px`;
    over(below(e.clientX, e.clientY));
  }

  /** @param {PointerEvent} e */
  function drop(e) {
    const slot = ghost && moved ? below(e.clientX, e.clientY) : null;
    ghost?.remove();
    ghost = null;
    over(null);
    if (slot) place(slot, picked.get(root) ?? "");
  }

  for (const cut of cuts) {
    cut.addEventListener("pointerdown", grab);
    cut.addEventListener("pointermove", drag);
    cut.addEventListener("pointerup", drop);
    cut.addEventListener("pointercancel", drop);
    cut.addEventListener("click", () => pick(cut.dataset.cut ?? ""));
  }
  for (const slot of slots) {
    slot.addEventListener("click", () => place(slot, picked.get(root) ?? ""));
    slot.addEventListener("pointerenter", () => picked.has(root) && over(slot));
    slot.addEventListener("pointerleave", () => over(null));
    slot.addEventListener("keydown", (e) => {
      /** @type {Record<string, number>} */
      const steps = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 };
      const now = letters.indexOf(chosen[slot.dataset.key ?? ""]);
      if (e.key === "Enter" || e.key === " ") place(slot, picked.get(root) ?? "");
      else if (e.key in steps) place(slot, letters[Math.max(0, Math.min(letters.length - 1, now + steps[e.key]))]);
      else return;
      e.preventDefault();
      e.stopPropagation();
    });
  }
  // Told before anything else on the page is used: told later, it would carry what the other controls were before.
  /** @param {Event} e */
  function first(e) {
    if (!waiting || e.composedPath().includes(box)) return;
    clearTimeout(waiting);
    say();
  }
  for (const kind of ["pointerdown", "keydown"]) document.addEventListener(kind, first, true);
  const held = picked.get(root);
  if (held) pick(held);
  const mine = owed.get(root);
  if (mine && (shows(mine.chosen) || mine.times >= MOST_TIMES)) owed.delete(root);
  else if (mine) {
    for (const slot of slots) place(slot, mine.chosen[slot.dataset.key ?? ""]); // this picture is older
    owed.set(root, mine);
  }
  return () => {
    for (const kind of ["pointerdown", "keydown"]) document.removeEventListener(kind, first, true);
    ghost?.remove();
    clearTimeout(again);
    if (!waiting) return;
    clearTimeout(waiting); // the answer to an older change comes now, and must not undo this one
    setTimeout(say);
  };
}
