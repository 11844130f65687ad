// A picture in motion (explorer/learn/pictures/film.py): play, pause, scrub, arrow keys. With reduced motion it steps from stop to stop.

const STOP_MS = 1400; // from one stop to the next
const REST = 0.25; // of it, standing at a stop

/**
 * Where everything is at time t: stops are whole numbers.
 * @param {HTMLElement} box
 * @param {number} t
 */
function placeAll(box, t) {
  const stop = Math.floor(t);
  const way = Math.max(0, (t - stop - REST) / (1 - REST));
  for (const cell of box.querySelectorAll(".cell")) {
    const { from, to } = /** @type {SVGElement} */ (cell).dataset;
    const seen = Number(from) <= stop && stop <= Number(to);
    /** @type {SVGElement} */ (cell).style.display = seen ? "" : "none";
  }
  for (const flight of box.querySelectorAll(".flight")) {
    const g = /** @type {SVGElement} */ (flight);
    const seen = Number(g.dataset.at) === stop && way > 0;
    g.style.display = seen ? "" : "none";
    if (!seen) continue;
    const [x0, y0, x1, y1] = (g.dataset.way ?? "").split(" ").map(Number);
    const eased = way * way * (3 - 2 * way);
    g.setAttribute("transform", `translate(${x0 + (x1 - x0) * eased} ${y0 + (y1 - y0) * eased})`);
  }
  for (const said of box.querySelectorAll(".said")) {
    const p = /** @type {HTMLElement} */ (said);
    p.style.display = Number(p.dataset.at) === stop ? "" : "none";
  }
}

/**
 * A button with a word on it.
 * @param {string} word
 * @param {() => void} act
 */
function wordedButton(word, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = word;
  made.addEventListener("click", act);
  return made;
}

/**
 * Bring the films inside `root` to life; returns what stops them.
 * @param {Element} root
 */
export function films(root) {
  const ends = [...root.querySelectorAll(".film")].map((box) => bring(/** @type {HTMLElement} */ (box)));
  return () => {
    for (const end of ends) end();
  };
}

/** @param {HTMLElement} box */
function bring(box) {
  const last = Number(box.dataset.stops) - 1;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let t = 0;
  let playing = 0;
  let before = 0;

  const range = document.createElement("input");
  Object.assign(range, { type: "range", min: "0", max: String(last), step: "any", value: "0" });
  range.setAttribute("aria-label", "Place in the motion");
  const stop = document.createElement("span");
  const play = wordedButton("Play", toggle);
  const bar = document.createElement("p");
  bar.className = "bar";
  bar.append(play, range, stop);
  box.prepend(bar);

  /** @param {number} to */
  function draw(to) {
    t = Math.max(0, Math.min(to, last));
    placeAll(box, t);
    const at = Math.floor(t);
    const words = box.querySelector(`.said[data-at="${at}"]`)?.textContent ?? "";
    stop.textContent = `${at + 1} of ${last + 1}`;
    range.value = String(t);
    range.setAttribute("aria-valuetext", `stop ${at + 1} of ${last + 1}. ${words}`);
  }

  /** @param {number} now */
  function frame(now) {
    const passed = before ? now - before : 0;
    before = now;
    const to = t + passed / STOP_MS;
    if (calm.matches) {
      if (Math.floor(to) > Math.floor(t)) draw(Math.floor(to));
      else t = to;
    } else draw(to);
    if (t >= last) pause();
    else playing = requestAnimationFrame(frame);
  }

  function pause() {
    cancelAnimationFrame(playing);
    playing = 0;
    before = 0;
    play.textContent = t >= last ? "Again" : "Play";
  }

  function toggle() {
    if (playing) return pause();
    if (t >= last) draw(0);
    play.textContent = "Pause";
    playing = requestAnimationFrame(frame);
  }

  range.addEventListener("input", () => {
    pause();
    draw(calm.matches ? Math.round(Number(range.value)) : Number(range.value));
    play.textContent = t >= last ? "Again" : "Play";
  });
  box.addEventListener("keydown", (e) => {
    /** @type {Record<string, () => number>} */
    const keys = {
      ArrowRight: () => Math.floor(t) + 1,
      ArrowLeft: () => Math.ceil(t) - 1,
      Home: () => 0,
      End: () => last,
    };
    if (!(e.key in keys)) return;
    e.preventDefault();
    e.stopPropagation();
    const to = keys[e.key]();
    pause();
    draw(to);
    play.textContent = t >= last ? "Again" : "Play";
  });
  draw(0);
  return pause;
}
