// Brings what moves and what can be changed in a lesson's picture to life.

import { builders } from "./builder.js";
import { films } from "./film.js";
import { sketches } from "./sketch.js";

/**
 * Bring the films, builders and sketches inside `root` to life; returns what stops them.
 * @param {HTMLElement} root
 * @param {Parameters<typeof builders>[1]} [tell] is given what was chosen in a builder
 */
export function alive(root, tell) {
  const ends = [films(root), builders(root, tell), sketches(root)];
  return () => {
    for (const end of ends) end();
  };
}
