// What the pointer or the focus is on, told to the other drawings and tables of the page.

let pointed = "";

/**
 * Tell a node's id; "" for none. The same one is told once.
 * @param {string} id
 */
export function point(id) {
  if (id === pointed) return;
  pointed = id;
  window.dispatchEvent(new CustomEvent("shardscope:node", { detail: id }));
}

/**
 * Call back with every id that is told; returns what ends that.
 * @param {(id: string) => void} hinted
 * @returns {() => void}
 */
export function whenPointed(hinted) {
  /** @param {Event} event */
  const listener = (event) => hinted(/** @type {CustomEvent<string>} */ (event).detail);
  window.addEventListener("shardscope:node", listener);
  return () => window.removeEventListener("shardscope:node", listener);
}
