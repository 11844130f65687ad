// One picture of a lesson: markup made and escaped in Python. Only a changed picture is drawn anew.
const shown = new WeakMap();

export default function (component) {
  const box = component.parentElement.querySelector(".lesson");
  const picture = component.data.picture;
  if (shown.get(box) === picture) return;
  const first = !shown.has(box);
  shown.set(box, picture);
  box.innerHTML = picture;
  box.classList.toggle("turned", !first);
  if (!first) {
    box.style.animation = "none";
    void box.offsetWidth; // start the animation again
    box.style.animation = "";
  }
}
