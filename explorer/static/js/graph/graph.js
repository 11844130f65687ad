// The model graph as SVG. Python sends positions; here nothing is laid out, only moved apart where a block is opened.
// What Python sends is GraphData of types.d.ts. What goes back is view = {selected, open, show}, where `open` is null
// until a block was opened or closed by hand. Pan, zoom, hover and search stay in the browser.

import { fillCard, placeCard } from "./graph_card.js";
import { Drawing, find } from "./graph_draw.js";
import { saveSvg } from "./graph_save.js";

/** @typedef {import("../types").GraphData} GraphData */
/** @typedef {import("../types").SceneNode} SceneNode */
/** @typedef {{ x: number, y: number, vx: number, vy: number, drag: boolean, target: EventTarget | null }} Press */

/** @type {WeakMap<ParentNode, Graph>} */
const instances = new WeakMap();
const STEPS = new Map([
  ["ArrowDown", 1],
  ["ArrowRight", 1],
  ["ArrowUp", -1],
  ["ArrowLeft", -1],
]);

/** @param {import("../types").Component<GraphData>} component */
export default function (component) {
  const root = component.parentElement;
  let graph = instances.get(root);
  if (!graph || !root.contains(graph.canvas)) {
    graph = new Graph(root);
    instances.set(root, graph);
  }
  graph.update(component);
  const shown = graph;
  return () => {
    shown.end();
    instances.delete(root);
  };
}

/**
 * The element around an event's target that fits a selector.
 * @param {EventTarget | null} target
 * @param {string} selector
 * @returns {HTMLElement | SVGElement | null}
 */
function around(target, selector) {
  return target instanceof Element ? target.closest(selector) : null;
}

class Graph extends Drawing {
  /** @param {ShadowRoot} root */
  constructor(root) {
    super(root);
    this.shadow = root;
    this.frame = find(root, ".graph", HTMLElement);
    this.card = find(root, ".card", HTMLElement);
    this.said = find(root, ".said", HTMLElement);
    this.count = find(root, ".matches", HTMLElement);
    this.input = find(root, "input", HTMLInputElement);
    this.select = find(root, "select", HTMLSelectElement);
    this.view = { x: 0, y: 0, k: 1 };
    this.moved = false;
    this.touched = false;
    /** @type {{ id: string, scope: string }[]} */
    this.matches = [];
    this.at = -1;
    this.selected = "";
    this.given = "";
    /** @type {string[]} */
    this.echoes = [];
    /** @type {(name: string, value: unknown) => void} */
    this.send = () => {};
    this.timer = 0;
    /** @type {Press | null} */
    this.press = null;
    this.listen();
    this.observer = new ResizeObserver(() => {
      if (!this.moved) this.fit();
    });
    this.observer.observe(this.canvas);
  }

  end() {
    this.observer.disconnect();
    clearTimeout(this.timer);
  }

  /** @param {import("../types").Component<GraphData>} component */
  update({ data, setStateValue }) {
    this.send = setStateValue;
    const before = this.take(data);
    const fresh = data.key !== before.key;
    this.frame.style.setProperty("--most", `${data.height || 800}px`);
    if (fresh || data.asked !== before.asked) this.restart(data, fresh);
    const led = this.follow(data.selected || "", fresh);
    this.select.value = this.show;
    this.draw();
    if (fresh) {
      this.input.value = "";
      this.search();
      this.fit();
    }
    if (led) this.reveal(this.selected);
  }

  /**
   * Show what Python asks for.
   * @param {GraphData} data
   * @param {boolean} fresh
   */
  restart(data, fresh) {
    this.open = new Set(data.open);
    this.show = data.show;
    this.touched = false;
    if (fresh) this.moved = false;
  }

  /**
   * Python repeats what was picked here a moment ago: an echo, which must not undo a newer pick.
   * @param {string} id
   * @param {boolean} fresh
   */
  follow(id, fresh) {
    const at = this.echoes.lastIndexOf(id);
    const before = this.selected;
    if (at >= 0 && !fresh) this.echoes.splice(0, at + 1);
    else if (fresh || id !== this.given) {
      this.selected = id;
      this.echoes = [];
    }
    this.given = id;
    return this.selected !== before;
  }

  /**
   * Show a node that was selected elsewhere: open its block, and bring it into the window if it is outside.
   * @param {string} id
   */
  reveal(id) {
    const home = Object.entries(this.scene.scopes).find(([, s]) => s.nodes.some((n) => n.id === id))?.[0];
    const runs = this.top.nodes.filter((n) => home && n.scope === home);
    if (runs.length && !runs.some((n) => this.open.has(n.id))) {
      this.open.add(runs[0].id);
      this.draw();
    }
    const s = this.shapes.find((shape) => shape.n.id === id);
    if (!s) return;
    const x = s.x * this.view.k + this.view.x;
    const y = s.y * this.view.k + this.view.y;
    if (x < 0 || y < 0 || x > this.canvas.clientWidth || y > this.canvas.clientHeight) this.centre(id);
  }

  // --- selection, search -----------------------------------------------------------------------

  mark() {
    const found = new Set(this.matches.map((m) => m.id));
    for (const { n, g } of this.shapes) {
      g.classList.toggle("picked", n.id === this.selected);
      g.classList.toggle("match", found.has(n.id));
    }
    for (const w of this.world.querySelectorAll(".wire")) {
      const { src, dst } = /** @type {SVGElement} */ (w).dataset;
      w.classList.toggle("lit", !!this.selected && (src === this.selected || dst === this.selected));
    }
  }

  /** @param {string} id */
  pick(id) {
    this.selected = id;
    this.card.hidden = true;
    this.mark();
    this.echoes.push(id);
    this.said.textContent = this.spoken(id);
    this.tell(0);
  }

  /**
   * What a screen reader says of a node.
   * @param {string} id
   */
  spoken(id) {
    const node = this.shapes.find((s) => s.n.id === id)?.n;
    if (!node) return "nothing selected";
    const { bare, overlay } = this.data;
    const said = [node.name, overlay.split[id]?.words ?? node.sub];
    if (bare?.[id]) said.push(bare[id]);
    return said.join(", ");
  }

  search() {
    const text = this.input.value.trim().toLowerCase();
    this.matches = text ? this.matching(text) : [];
    this.at = -1;
    this.count.textContent = this.matches.length ? `${this.matches.length} found` : "no match";
    if (!text) this.count.textContent = "";
    for (const step of ["previous", "next"]) find(this.root, `[data-do=${step}]`, HTMLButtonElement).hidden = !text;
    this.mark();
  }

  /** @param {string} text */
  matching(text) {
    return Object.entries(this.scene.scopes).flatMap(([scope, { nodes }]) => {
      const found = nodes.filter((n) => {
        const words = `${n.name} ${n.sub} ${n.id} ${(n.facts ?? []).join(" ")}`;
        return n.kind !== "port" && words.toLowerCase().includes(text);
      });
      return found.map((n) => ({ id: n.id, scope }));
    });
  }

  /**
   * Go to the next match, or to the one before.
   * @param {number} step
   */
  visit(step) {
    if (!this.matches.length) return;
    this.at = (this.at + step + this.matches.length) % this.matches.length;
    const { id, scope } = this.matches[this.at];
    const runs = scope ? this.top.nodes.filter((n) => n.scope === scope) : [];
    if (runs.length && !runs.some((n) => this.open.has(n.id))) this.flip(runs[0].id);
    this.count.textContent = `${this.at + 1} of ${this.matches.length}`;
    this.centre(id);
    this.pick(id);
  }

  /**
   * Open every run of one kind of block, or close them where the asked one is open.
   * @param {SceneNode | undefined} asked
   */
  flipKind(asked) {
    const alike = this.runs().filter((n) => n.scope === asked?.scope);
    if (!asked || !alike.length) return;
    const close = this.open.has(asked.id);
    for (const { id } of alike) {
      if (close) this.open.delete(id);
      else this.open.add(id);
    }
    this.flipped();
  }

  runs() {
    return this.top.nodes.filter((n) => n.kind === "block");
  }

  /**
   * Open a block, or close it if it is open.
   * @param {string} id
   */
  flip(id) {
    if (!this.open.delete(id)) this.open.add(id);
    this.flipped();
  }

  flipped() {
    this.touched = true;
    this.draw();
    if (!this.moved) this.fit();
    this.tell();
  }

  /** One message holds all, so that no part of it can be older than another. Opening blocks tells Python a moment later. */
  tell(wait = 500) {
    clearTimeout(this.timer);
    const say = () => {
      const open = this.touched ? [...this.open] : null;
      // `at` makes two equal choices two messages
      this.send("view", { at: Date.now(), selected: this.selected, open, show: this.show });
    };
    if (wait) this.timer = window.setTimeout(say, wait);
    else say();
  }

  // --- pan and zoom ------------------------------------------------------------------------------

  /** From afar, words are under four pixels high. They and the arrow heads are left out: drawing them is most of a frame. */
  place() {
    this.world.setAttribute("transform", `translate(${this.view.x} ${this.view.y}) scale(${this.view.k})`);
    this.world.classList.toggle("far", this.view.k < 0.3);
  }

  fit() {
    const w = this.canvas.clientWidth;
    if (!w || !this.world.childElementCount) return;
    const box = this.world.getBBox();
    const across = (w - 32) / box.width;
    this.canvas.style.setProperty("--drawn", `${Math.ceil(Math.min(1.25, across) * box.height + 32)}px`);
    // The page keeps the room of the whole frame until this is known, so that nothing jumps far (app.css).
    this.shadow.host?.closest(".st-key-graph")?.setAttribute("data-drawn", "");
    const h = this.canvas.clientHeight;
    const whole = Math.min(1.25, across, (h - 32) / box.height);
    const k = Math.max(whole, Math.min(0.7, across)); // rather cut off below than unreadably small
    const x = w / 2 - (box.x + box.width / 2) * k;
    const y = whole < k ? 16 - box.y * k : h / 2 - (box.y + box.height / 2) * k;
    this.view = { k, x, y };
    this.moved = false;
    this.place();
  }

  /** @param {number} factor */
  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const k = Math.min(4, Math.max(0.05, this.view.k * factor));
    const f = k / this.view.k;
    this.view = { k, x: x - (x - this.view.x) * f, y: y - (y - this.view.y) * f };
    this.moved = true;
    this.place();
  }

  /** @param {string} id */
  centre(id) {
    const s = this.shapes.find((shape) => shape.n.id === id);
    if (!s) return;
    this.view.x = this.canvas.clientWidth / 2 - s.x * this.view.k;
    this.view.y = this.canvas.clientHeight / 2 - s.y * this.view.k;
    this.moved = true;
    this.place();
  }

  // --- events ------------------------------------------------------------------------------------

  listen() {
    this.listenToPointer();
    this.canvas.onkeydown = (e) => this.typed(e);
    this.input.oninput = () => this.search();
    this.input.onkeydown = (e) => {
      if (e.key !== "Enter") return;
      e.preventDefault();
      this.visit(e.shiftKey ? -1 : 1);
    };
    this.select.onchange = () => {
      this.show = /** @type {import("../types").Show} */ (this.select.value);
      this.draw();
      this.tell();
    };
    find(this.root, ".tools", HTMLElement).onclick = (e) => this.command(around(e.target, "[data-do]")?.dataset.do);
  }

  listenToPointer() {
    const c = this.canvas;
    c.onpointerdown = (e) => {
      const { x: vx, y: vy } = this.view;
      if (e.button === 0) this.press = { x: e.clientX, y: e.clientY, vx, vy, drag: false, target: e.target };
    };
    c.onpointermove = (e) => (this.press ? this.drag(e, this.press) : this.hover(e));
    c.onpointerup = (e) => {
      const was = this.press;
      this.press = null;
      c.classList.remove("moving");
      if (was && !was.drag) this.click(was.target, e.shiftKey);
    };
    c.onpointercancel = () => {
      this.press = null;
    };
    c.onpointerleave = () => {
      this.card.hidden = true;
    };
    c.ondblclick = (e) => {
      const id = around(e.target, ".node.block")?.dataset.id;
      if (id) this.flip(id);
    };
    c.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
  }

  /** @param {WheelEvent} e */
  wheel(e) {
    // the page scrolls until the graph has been clicked
    if (!e.ctrlKey && !e.metaKey && this.shadow.activeElement !== this.canvas) return;
    e.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    this.zoom(Math.exp(-e.deltaY * 0.0015), e.clientX - box.left, e.clientY - box.top);
  }

  /**
   * @param {PointerEvent} e
   * @param {Press} press
   */
  drag(e, press) {
    const dx = e.clientX - press.x;
    const dy = e.clientY - press.y;
    if (!press.drag && Math.hypot(dx, dy) > 4) {
      press.drag = true;
      this.canvas.setPointerCapture(e.pointerId);
      this.canvas.classList.add("moving");
      this.card.hidden = true;
    }
    if (!press.drag) return;
    this.view.x = press.vx + dx;
    this.view.y = press.vy + dy;
    this.moved = true;
    this.place();
  }

  /** @param {string | undefined} name */
  command(name) {
    /** @type {Record<string, () => void>} */
    const commands = {
      previous: () => this.visit(-1),
      next: () => this.visit(1),
      fit: () => this.fit(),
      svg: () => saveSvg(this),
    };
    if (name) commands[name]?.();
  }

  /**
   * @param {EventTarget | null} target
   * @param {boolean} alike
   */
  click(target, alike) {
    const toggled = around(target, "[data-toggle]")?.dataset.toggle;
    const node = around(target, ".node");
    if (toggled) this.turn(toggled, alike);
    else if (node?.dataset.id && !node.classList.contains("port")) this.pick(node.dataset.id);
  }

  /**
   * Open or close one block, or all of its kind.
   * @param {string} id
   * @param {boolean} alike
   */
  turn(id, alike) {
    if (alike) this.flipKind(this.runs().find((n) => n.id === id));
    else this.flip(id);
  }

  /** @param {KeyboardEvent} e */
  typed(e) {
    const step = STEPS.get(e.key);
    /** @type {Record<string, () => void>} */
    const keys = {
      Enter: () => this.enter(e.shiftKey),
      " ": () => this.enter(e.shiftKey),
      "+": () => this.zoom(1.25),
      "=": () => this.zoom(1.25),
      "-": () => this.zoom(0.8),
      0: () => this.fit(),
      Escape: () => this.pick(""),
    };
    if (step && this.stops().length) this.walk(step);
    else if (keys[e.key]) keys[e.key]();
    else return;
    e.preventDefault();
  }

  /** The nodes in the order in which the arrow keys walk them. */
  stops() {
    const nodes = this.shapes.filter((s) => s.n.kind !== "port");
    return nodes.sort((a, b) => a.y - a.h / 2 - (b.y - b.h / 2) || a.x - b.x);
  }

  /** @param {number} step */
  walk(step) {
    const stops = this.stops();
    const at = stops.findIndex((s) => s.n.id === this.selected);
    const { id } = stops[(at + step + stops.length) % stops.length].n;
    this.pick(id);
    this.centre(id);
  }

  /** @param {boolean} alike */
  enter(alike) {
    const node = this.shapes.find((s) => s.n.id === this.selected)?.n;
    if (node?.kind === "block") this.turn(node.id, alike);
  }

  /** @param {PointerEvent} e */
  hover(e) {
    const g = around(e.target, ".node");
    const node = g && this.shapes.find((s) => s.g === g)?.n;
    if (!node || node.kind === "port") {
      this.card.hidden = true;
      return;
    }
    fillCard(this, this.card, node);
    placeCard(this.card, find(this.root, ".graph", HTMLElement), e);
  }
}
