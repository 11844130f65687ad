// The lessons as links. A plain click turns the lesson in place; with Ctrl, the middle button and the like it is any link.
const drawn = new WeakMap();

export default function (component) {
  const { data, parentElement, setTriggerValue } = component;
  const nav = parentElement.querySelector("nav");
  const state = JSON.stringify(data);
  if (drawn.get(nav) === state) return;
  drawn.set(nav, state);
  const focused = [...nav.children].indexOf(nav.getRootNode().activeElement);
  nav.replaceChildren(...data.lessons.map((lesson) => {
    const link = document.createElement("a");
    const number = document.createElement("span"), title = document.createElement("span");
    number.textContent = lesson.number;
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
  }));
  if (focused >= 0) nav.children[focused].focus();
}
