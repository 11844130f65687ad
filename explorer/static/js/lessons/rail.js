// The lessons as links. A plain click turns the lesson in place; with Ctrl, the middle button and the like it is any link.

import { land, onceStill } from "./land.js";

/** @type {WeakMap<Element, string>} */
const drawn = new WeakMap();
const LESSON = ".st-key-lesson_head h2";

const KEPT = "shardscope_done"; // explorer/learn/visit/progress.py
const YEAR_S = 365 * 24 * 3600;
let forgotten = 0;

/** What this browser remembers, perhaps from another tab. */
function kept() {
  const found = document.cookie.split("; ").find((pair) => pair.startsWith(`${KEPT}=`)) ?? "";
  return found
    .slice(KEPT.length + 1)
    .split(".")
    .filter(Boolean);
}

/**
 * Keep what is done and answered where the page finds it when it opens; a browser that keeps no cookies forgets.
 * @param {import("../types").RailData} data
 */
function remember(data) {
  const done = data.lessons.filter((lesson) => lesson.done).map((lesson) => lesson.key);
  const answered = data.lessons.filter((lesson) => lesson.answer);
  const before = data.forgotten === forgotten ? kept() : [];
  forgotten = data.forgotten;
  // a lesson's new answer takes the place of the one before
  const others = before.filter((part) => !answered.some((lesson) => part.startsWith(`${lesson.key}~`)));
  const all = [...new Set([...others, ...done, ...answered.map((lesson) => `${lesson.key}~${lesson.answer}`)])].join(
    ".",
  );
  // biome-ignore lint/suspicious/noDocumentCookie: the page reads it when it opens; the Cookie Store API is not everywhere
  document.cookie = `${KEPT}=${all}; path=/; max-age=${YEAR_S}; samesite=strict`;
}

/** A link past the numbers of the lessons. */
function skip() {
  const link = document.createElement("a");
  link.textContent = "Skip to the lesson";
  link.className = "skip";
  link.href = "#";
  link.addEventListener("click", (e) => {
    e.preventDefault();
    land(LESSON);
  });
  return link;
}

/**
 * The link of the rail that has the focus.
 * @param {HTMLElement} nav
 */
function onRail(nav) {
  return /** @type {ShadowRoot} */ (nav.getRootNode()).activeElement;
}

/**
 * Another lesson begins at its top, also where it was turned to from the foot of the last one.
 * @param {HTMLElement} nav
 * @param {import("../types").RailData} data
 */
function turned(nav, data) {
  const before = nav.querySelector("[aria-current]")?.firstChild?.textContent;
  const now = data.lessons.find((lesson) => lesson.state === "here")?.number;
  if (before === String(now)) return;
  onceStill(() => {
    document.querySelector("[data-testid=stMain]")?.scrollTo(0, 0);
    // asked now, not before: the browser may draw the rail and the lesson at once, and the button that was pressed is gone by then
    if (!onRail(nav)) land(LESSON);
  });
}

/** @param {import("../types").Component<import("../types").RailData>} component */
export default function ({ data, parentElement, setTriggerValue }) {
  const nav = parentElement.querySelector("nav");
  const state = JSON.stringify(data);
  if (!nav || drawn.get(nav) === state) return;
  if (drawn.has(nav)) turned(nav, data);
  else nav.before(skip());
  drawn.set(nav, state);
  remember(data);
  const here = onRail(nav);
  const focused = here ? [...nav.children].indexOf(here) : -1;
  nav.replaceChildren(
    ...data.lessons.map((lesson) => {
      const link = document.createElement("a");
      const number = document.createElement("span");
      const title = document.createElement("span");
      number.textContent = String(lesson.number);
      title.textContent = ` ${lesson.title}`;
      title.className = "title";
      link.append(number, title);
      link.href = `?${lesson.query}`;
      link.className = lesson.state;
      if (lesson.state === "here") link.setAttribute("aria-current", "page");
      link.addEventListener("click", (e) => {
        if (e.metaKey || e.ctrlKey || e.shiftKey || e.altKey || e.button) return;
        e.preventDefault();
        setTriggerValue("go", lesson.number);
      });
      return link;
    }),
  );
  const again = nav.children[focused];
  if (again instanceof HTMLElement) again.focus();
}
