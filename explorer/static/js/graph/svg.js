// Shows one SVG drawing that Python made. Parsed as XML, so that nothing in it can run.

/** @param {import("../types").Component<{ svg: string }>} component */
export default function ({ data, parentElement }) {
  const place = parentElement.querySelector(".svg");
  const parsed = new DOMParser().parseFromString(data.svg, "image/svg+xml").documentElement;
  if (parsed.nodeName !== "svg" || parsed.querySelector("script, foreignObject")) return;
  place?.replaceChildren(document.importNode(parsed, true));
}
