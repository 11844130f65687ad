// The lessons as links. A plain click turns the lesson in place; with Ctrl, the middle button and the like it is any link.

/** @type {WeakMap<Element, string>} */
const drawn = new WeakMap();

const KEPT = "shardscope.learn.done";
let forgotten = 0;

/** What this browser remembers; nothing where it must not keep anything. */
function kept() {
  try {
    return (localStorage.getItem(KEPT) ?? "").split(",").map(Number).filter(Boolean);
  } catch {
    return [];
  }
}

/**
 * Keep what is done, and tell the page what it does not know yet.
 * @param {import("./types").RailData} data
 * @param {(name: string, value: unknown) => void} tell
 */
function remember(data, tell) {
  const here = data.lessons.filter((lesson) => lesson.done).map((lesson) => lesson.number);
  const before = data.forgotten === forgotten ? kept() : [];
  forgotten = data.forgotten;
  try {
    localStorage.setItem(KEPT, [...new Set([...before, ...here])].join(","));
  } catch {
    return; // nothing is kept, nothing is lost
  }
  if (before.some((number) => !here.includes(number))) tell("known", before.join(","));
}

/** @param {import("./types").Component<import("./types").RailData>} component */
export default function ({ data, parentElement, setTriggerValue }) {
  const nav = parentElement.querySelector("nav");
  const state = JSON.stringify(data);
  if (!nav || drawn.get(nav) === state) return;
  drawn.set(nav, state);
  remember(data, setTriggerValue);
  const here = /** @type {ShadowRoot} */ (nav.getRootNode()).activeElement;
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
