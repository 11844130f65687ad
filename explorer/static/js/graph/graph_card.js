// The card that stands beside the pointer: what a node is, holds, works and sends.

/** @typedef {[name: string, value: string]} Line */

/**
 * The lines of a node's card.
 * @param {import("./graph_draw.js").Drawing} graph
 * @param {import("../types").SceneNode} node
 * @returns {Line[]}
 */
function lines(graph, node) {
  const { overlay, bare } = graph.data;
  const work = overlay.flops?.nodes[node.id]?.[0];
  const held = overlay.memory?.nodes[node.id]?.[0];
  const without = bare?.[node.id];
  /** @type {Line[]} */
  const found = [...(node.facts ?? [])];
  if (work) found.push(["work of one GPU", `${work} forward`]);
  if (held) found.push(["memory of one GPU", held]);
  const split = overlay.split[node.id];
  if (split) found.push(["weight", split.words]);
  for (const m of graph.sent(node.id)) {
    const times = m.count > 1 ? `${m.count} × ` : "";
    found.push([m.kind, `${times}${m.text} on ${m.axis}`]);
  }
  if (without) found.push(["no rule", without.replace(/^no rule /, "")]);
  return found;
}

/**
 * Fill the card with what is known of a node.
 * @param {import("./graph_draw.js").Drawing} graph
 * @param {HTMLElement} card
 * @param {import("../types").SceneNode} node
 */
export function fillCard(graph, card, node) {
  const title = document.createElement("b");
  const list = document.createElement("dl");
  title.textContent = node.name;
  for (const [name, value] of lines(graph, node)) {
    const dt = document.createElement("dt");
    const dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    list.append(dt, dd);
  }
  card.replaceChildren(title, list);
  card.hidden = false;
}

/**
 * Put the card beside the pointer, inside the box around the drawing.
 * @param {HTMLElement} card
 * @param {Element} around
 * @param {MouseEvent} e
 */
export function placeCard(card, around, e) {
  const box = around.getBoundingClientRect();
  const x = e.clientX - box.left;
  const y = e.clientY - box.top;
  const left = x + 16 + card.offsetWidth > box.width ? x - 16 - card.offsetWidth : x + 16;
  card.style.left = `${Math.max(4, left)}px`;
  card.style.top = `${Math.max(4, Math.min(y + 12, box.height - card.offsetHeight - 6))}px`;
}
