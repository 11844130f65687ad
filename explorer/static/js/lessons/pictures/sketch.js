// A prediction that is drawn (explorer/learn/pictures/sketch.py): handles are dragged with a mouse or a finger, or moved with keys. Only then is the
// truth shown, with how far off each was, and what is wrong with a mistake that was expected.

const NEAR_TRUTH = 0.1; // of the truth, or
const NEAR_SCALE = 0.04; // of the scale, is near enough for a hand
const LIKE_SLIP = 0.08; // of the scale, on average: as a mistake that was expected
const KEY_STEPS = 100; // of the scale, one for an arrow key
const KEY_PAGE = 10;

/** @type {Map<string, { values: number[], compared: boolean }>} What was drawn, by sketch, for as long as the page lives. */
const sketched = new Map();

/**
 * Bring the sketches inside `root` to life; returns what stops them.
 * @param {Element} root
 */
export function sketches(root) {
  const ends = [...root.querySelectorAll(".sketch")].map((box) => sketchIn(/** @type {HTMLElement} */ (box)));
  return () => {
    for (const end of ends) end();
  };
}

/**
 * Three figures, as Python's units.significant writes them.
 * @param {number} value
 */
function threeFigures(value) {
  if (Math.abs(value) >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

/**
 * @param {number} value
 * @param {number} truth
 * @param {number} most
 */
function nearEnough(value, truth, most) {
  return Math.abs(value - truth) <= Math.max(NEAR_TRUTH * Math.abs(truth), NEAR_SCALE * most);
}

/**
 * How far a drawing is from another on average, in parts of the scale; where the other one has null, anything goes.
 * @param {number[]} values
 * @param {(number | null)[]} other
 * @param {number} most
 */
function farApart(values, other, most) {
  const off = values.flatMap((v, i) => (other[i] === null ? [] : [Math.abs(v - (other[i] ?? 0)) / most]));
  return off.reduce((sum, x) => sum + x, 0) / off.length;
}

/**
 * What is said to one handle: what was drawn, what it is, and how far off.
 * @param {import("../../types").Sketch} sketch
 * @param {{ name: string, truth: number }} handle
 * @param {number} value
 */
function lineFor({ look, unit, most }, { name, truth }, value) {
  const span = look === "span";
  const [yours, its] = span ? ["you let it begin at", "it begins at"] : ["you drew", "it is"];
  const drew = `${name}: ${yours} ${threeFigures(value)} ${unit}, ${its} ${threeFigures(truth)} ${unit}`;
  if (nearEnough(value, truth, most)) return `${drew}. Near enough.`;
  const off = value - truth;
  if (span) return `${drew}: ${threeFigures(Math.abs(off))} ${unit} too ${off < 0 ? "early" : "late"}.`;
  if (truth < NEAR_SCALE * most) return `${drew}: too much.`;
  const times = value / truth;
  if (times > 2) return `${drew}: ${threeFigures(times)} times as much.`;
  return `${drew}: ${Math.round(Math.abs(times - 1) * 100)} % too ${off < 0 ? "little" : "much"}.`;
}

/**
 * What is said to a drawing: whether it is right, the words for it, and a line for each handle.
 * @param {import("../../types").Sketch} sketch
 * @param {number[]} values
 * @returns {{ right: boolean, says: string, lines: string[] }}
 */
export function judgeDrawing(sketch, values) {
  const { handles, most } = sketch;
  const truths = handles.map((h) => h.truth);
  const right = handles.every((h, i) => nearEnough(values[i], h.truth, most));
  const lines = handles.map((h, i) => lineFor(sketch, h, values[i]));
  const slips = sketch.slips.flatMap((slip) => {
    const far = farApart(values, slip.values, most);
    const true_ = truths.map((truth, i) => (slip.values[i] === null ? null : truth));
    return far < Math.min(LIKE_SLIP, farApart(values, true_, most)) ? [{ why: slip.why, far }] : [];
  });
  const like = slips.sort((a, b) => a.far - b.far)[0]?.why ?? "";
  return { right, says: right ? sketch.why : `${like} ${sketch.why}`.trim(), lines };
}

/** @param {HTMLElement} box */
function sketchIn(box) {
  /** @type {import("../../types").Sketch} */
  const sketch = JSON.parse(box.dataset.sketch ?? "");
  const { look, from, to, most, unit } = sketch;
  const svg = /** @type {SVGSVGElement} */ (box.querySelector("svg"));
  const handles = /** @type {SVGGElement[]} */ ([...box.querySelectorAll(".handle")]);
  const truth = /** @type {SVGGElement} */ (box.querySelector(".truth"));
  const compare = /** @type {HTMLButtonElement} */ (box.querySelector(".compare"));
  const said = /** @type {HTMLElement} */ (box.querySelector(".said"));
  const state = sketched.get(sketch.key) ?? { values: sketch.handles.map((h) => h.start), compared: false };
  sketched.set(sketch.key, state);
  /** @type {SVGGElement | null} */
  let held = null;
  let grabbed = 0; // where on the handle it was taken

  /** @param {SVGGElement} handle */
  const at = (handle) => Number(handle.dataset.at);
  /** @param {number} value */
  const pixel = (value) => from + (value / most) * (to - from);

  /** @param {SVGGElement} handle */
  function show(handle) {
    const value = state.values[at(handle)];
    const p = pixel(value);
    const move = svg.createSVGTransform();
    const now = handle.transform.baseVal.consolidate()?.matrix;
    move.setTranslate(look === "point" ? (now?.e ?? 0) : p, look === "point" ? p : (now?.f ?? 0));
    handle.transform.baseVal.initialize(move);
    const words = `${threeFigures(value)} ${unit}`;
    handle.setAttribute("aria-valuenow", String(value));
    handle.setAttribute("aria-valuetext", words);
    const label = handle.querySelector(".value");
    if (label) label.textContent = look === "point" ? threeFigures(value) : words;
    const fill = handle.querySelector(".fill");
    fill?.setAttribute("x", String(from - p));
    fill?.setAttribute("width", String(p - from));
  }

  function showLines() {
    for (const line of /** @type {SVGPathElement[]} */ ([...box.querySelectorAll(".drawn")])) {
      const points = handles
        .filter((h) => String(sketch.handles[at(h)].line) === line.dataset.line)
        .map((h) => {
          const { e, f } = h.transform.baseVal.getItem(0).matrix;
          return `${e} ${f}`;
        });
      if (line.dataset.begin) points.unshift(line.dataset.begin);
      line.setAttribute("d", `M${points.join("L")}`);
    }
  }

  function showAll() {
    for (const handle of handles) show(handle);
    showLines();
    truth.setAttribute("visibility", state.compared ? "visible" : "hidden");
    box.classList.toggle("compared", state.compared);
    compare.textContent = state.compared ? "Draw again" : "Compare";
    for (const handle of handles) handle.setAttribute("aria-disabled", String(state.compared));
  }

  /**
   * @param {SVGGElement} handle
   * @param {number} value
   */
  function set(handle, value) {
    state.values[at(handle)] = Math.max(0, Math.min(most, value));
    show(handle);
    showLines();
  }

  function tell() {
    const { right, says, lines } = judgeDrawing(sketch, state.values);
    const head = document.createElement("p");
    const word = document.createElement("strong");
    word.textContent = right ? "As near as a hand can draw. " : "Not quite. ";
    head.append(word, says);
    const list = document.createElement("ul");
    for (const line of lines) {
      const item = document.createElement("li");
      item.textContent = line;
      list.append(item);
    }
    said.replaceChildren(head, list);
  }

  /** @param {PointerEvent} e */
  function where(e) {
    const matrix = svg.getScreenCTM()?.inverse();
    const point = new DOMPoint(e.clientX, e.clientY).matrixTransform(matrix);
    return look === "point" ? point.y : point.x;
  }

  /** @param {PointerEvent} e */
  function drag(e) {
    if (held) set(held, ((where(e) - grabbed - from) / (to - from)) * most);
  }

  // as properties, since slides bring the same sketch to life each time that they turn to it
  for (const handle of handles) {
    handle.onpointerdown = (e) => {
      if (e.button !== 0 || state.compared) return;
      held = handle;
      grabbed = where(e) - pixel(state.values[at(handle)]);
      handle.setPointerCapture(e.pointerId);
      handle.focus();
    };
    // else the page scrolls with the finger: touch-action does not hold inside SVG
    handle.addEventListener("touchstart", (e) => !state.compared && e.preventDefault(), { passive: false });
    handle.onpointermove = (e) => held === handle && drag(e);
    handle.onpointerup = (e) => {
      if (held === handle) drag(e); // a finger's last move may come with its end only
      held = null;
    };
    handle.onpointercancel = () => {
      held = null;
    };
    handle.onkeydown = (e) => {
      /** @type {Record<string, number>} */
      const steps = {
        ArrowUp: 1,
        ArrowRight: 1,
        ArrowDown: -1,
        ArrowLeft: -1,
        PageUp: KEY_PAGE,
        PageDown: -KEY_PAGE,
        Home: -KEY_STEPS,
        End: KEY_STEPS,
      };
      if (!(e.key in steps)) return;
      e.preventDefault();
      e.stopPropagation();
      if (!state.compared) set(handle, state.values[at(handle)] + (steps[e.key] * most) / KEY_STEPS);
    };
  }
  compare.onclick = () => {
    if (!state.compared && state.values.every((v, i) => v === sketch.handles[i].start)) {
      said.textContent = "Nothing is drawn yet: move a handle first.";
      return;
    }
    state.compared = !state.compared;
    if (state.compared) tell();
    else said.replaceChildren();
    showAll();
  };
  showAll();
  if (state.compared) tell();
  return () => {
    held = null;
  };
}
