// The lessons as links. A plain click turns the lesson in place; with Ctrl, the middle button and the like it is any link.

/** @type {WeakMap<Element, string>} */
const drawn = new WeakMap();

/** @param {import("./types").Component<import("./types").RailData>} component */
export default function ({ data, parentElement, setTriggerValue }) {
  const nav = parentElement.querySelector("nav");
  const state = JSON.stringify(data);
  if (!nav || drawn.get(nav) === state) return;
  drawn.set(nav, state);
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
