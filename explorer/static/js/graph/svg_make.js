// Makes SVG elements.

export const SVG = "http://www.w3.org/2000/svg";

/**
 * A new SVG element, put into its parent if one is given.
 * @template {keyof SVGElementTagNameMap} Name
 * @param {Name} name
 * @param {Record<string, string | number>} attributes
 * @param {Element} [parent]
 * @param {string} [text]
 * @returns {SVGElementTagNameMap[Name]}
 */
export function make(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  if (text !== undefined) element.textContent = text;
  parent?.appendChild(element);
  return element;
}
