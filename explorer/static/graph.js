// The model graph as SVG. Python sends positions; here nothing is laid out, only moved apart where a block is opened.
// data = {key, scene, overlay: {placement, messages, memory, flops, words}, bare: {id: why it runs whole}, devices, selected, open, show,
//         marks: {id: how it is in the other graph}, other}
// Sends back: view = {selected, open (null until a block was opened or closed by hand), show}; pan, zoom, hover and search stay in the browser.

const instances = new WeakMap();

export default function (component) {
  const root = component.parentElement;
  let graph = instances.get(root);
  if (!graph || !root.contains(graph.canvas)) {
    graph = new Graph(root);
    instances.set(root, graph);
  }
  graph.update(component);
  return () => { graph.observer.disconnect(); window.removeEventListener("shardscope:node", graph.hint); clearTimeout(graph.timer); instances.delete(root); };
}

// What it draws where: graph_draw.js; as a file: graph_save.js.
class Graph extends Drawing {
  constructor(root) {
    super();
    const find = (selector) => root.querySelector(selector);
    this.root = root;
    this.canvas = find(".canvas"); this.world = find(".world"); this.card = find(".card");
    this.legend = find(".legend"); this.said = find(".said"); this.count = find(".matches");
    this.input = find("input"); this.select = find("select"); this.kind = find("[data-do=kind]");
    this.view = { x: 0, y: 0, k: 1 };
    this.open = new Set(); this.show = "graph"; this.matches = []; this.at = -1;
    this.selected = ""; this.given = ""; this.echoes = [];
    this.listen();
    this.observer = new ResizeObserver(() => { if (!this.moved) this.fit(); });
    this.observer.observe(this.canvas);
    this.hint = ({ detail }) => this.hinted(detail);
    window.addEventListener("shardscope:node", this.hint);
  }

  // What the pointer is on in another graph or table of the page is outlined here; inside a closed block the block is.
  hinted(id) {
    const shown = this.shapes.some((s) => s.n.id === id), home = id.slice(0, Math.max(0, id.lastIndexOf(":")));
    for (const { n, g } of this.shapes) g.classList.toggle("hinted", !!id && (n.id === id || (!shown && !!home && n.scope === home)));
  }

  update({ data, setStateValue }) {
    this.send = setStateValue;
    const fresh = data.key !== this.key;
    this.data = data; this.scene = data.scene; this.key = data.key;
    this.root.querySelector(".graph").style.height = `${data.height || 800}px`;
    if (fresh || data.asked !== this.asked) {
      this.open = new Set(data.open); this.touched = false; this.show = data.show; this.asked = data.asked;
      this.moved = this.moved && !fresh;
    }
    else if (data.other) this.join(data);
    this.told = [String(data.open), data.show];
    const led = this.follow(data.selected || "", fresh) && data.other;
    this.select.value = this.show;
    this.kind.hidden = !this.runs().some((n, i, all) => all.findIndex((m) => m.scope === n.scope) < i);
    this.draw();
    if (led) this.reveal(this.selected);
    if (fresh) { this.input.value = ""; this.search(); this.fit(); }
  }

  // Python repeats what was picked here a moment ago: an echo, which must not undo a newer pick.
  follow(id, fresh) {
    const at = this.echoes.lastIndexOf(id), before = this.selected;
    if (at >= 0 && !fresh) this.echoes.splice(0, at + 1);
    else if (fresh || id !== this.given) { this.selected = id; this.echoes = []; }
    this.given = id;
    return this.selected !== before;
  }

  // Beside another graph: what was opened or shown there since is opened and shown here.
  join(data) {
    if (String(data.open) !== this.told[0]) this.open = new Set(data.open);
    if (data.show !== this.told[1]) this.show = data.show;
  }

  // Show a node that was selected elsewhere: open its block, and bring it into the window if it is outside.
  reveal(id) {
    const home = Object.entries(this.scene.scopes).find(([, s]) => s.nodes.some((n) => n.id === id))?.[0];
    const runs = this.scene.scopes[""].nodes.filter((n) => home && n.scope === home);
    if (runs.length && !runs.some((n) => this.open.has(n.id))) { this.open.add(runs[0].id); this.draw(); }
    const s = this.shapes.find((shape) => shape.n.id === id);
    if (!s) return;
    const x = s.x * this.view.k + this.view.x, y = s.y * this.view.k + this.view.y;
    if (x < 0 || y < 0 || x > this.canvas.clientWidth || y > this.canvas.clientHeight) this.centre(id);
  }

  // --- selection, search -----------------------------------------------------------------------

  mark() {
    const found = new Set(this.matches.map((m) => m.id));
    for (const { n, g } of this.shapes) {
      g.classList.toggle("picked", n.id === this.selected);
      g.classList.toggle("match", found.has(n.id));
    }
    for (const w of this.world.querySelectorAll(".wire"))
      w.classList.toggle("lit", !!this.selected && (w.dataset.src === this.selected || w.dataset.dst === this.selected));
    this.kind.disabled = !this.block();
  }

  pick(id) {
    this.selected = id;
    this.mark();
    const shape = this.shapes.find((s) => s.n.id === id);
    this.echoes.push(id);
    const differs = this.data.marks?.[id];
    this.said.textContent = shape ? `${shape.n.label}, ${shape.n.sub}${differs ? `, differs: ${differs} in ${this.data.other}` : ""}${this.data.bare?.[id] ? `, ${this.data.bare[id]}` : ""}` : "nothing selected";
    this.tell(0);
  }

  search() {
    const text = this.input.value.trim().toLowerCase();
    this.matches = []; this.at = -1;
    if (text) for (const [name, s] of Object.entries(this.scene.scopes)) for (const n of s.nodes)
      if (n.kind !== "port" && `${n.label} ${n.sub} ${n.id} ${(n.facts || []).join(" ")}`.toLowerCase().includes(text)) this.matches.push({ id: n.id, scope: name });
    this.count.textContent = !text ? "" : this.matches.length ? `${this.matches.length} found` : "no match";
    this.mark();
  }

  visit(step) {
    if (!this.matches.length) return;
    this.at = (this.at + step + this.matches.length) % this.matches.length;
    const { id, scope } = this.matches[this.at];
    const run = scope && this.scene.scopes[""].nodes.find((n) => n.scope === scope);
    if (run && !this.scene.scopes[""].nodes.some((n) => n.scope === scope && this.open.has(n.id))) this.flip(run.id);
    this.count.textContent = `${this.at + 1} of ${this.matches.length}`;
    this.centre(id);
    this.pick(id);
  }

  // Every run of one kind of block: opened, or closed where the asked one is open.
  flipKind(scope, id = this.block()?.id) {
    const alike = this.runs().filter((n) => n.scope === scope).map((n) => n.id), close = this.open.has(id);
    for (const one of alike) if (close) this.open.delete(one); else this.open.add(one);
    if (alike.length) this.flipped();
  }

  // The run that is selected, or one around the selected node.
  block() {
    const scope = this.selected.slice(0, Math.max(0, this.selected.lastIndexOf(":")));
    return this.runs().find((n) => n.id === this.selected) || this.runs().find((n) => n.scope === scope && this.open.has(n.id));
  }

  runs() { return this.scene.scopes[""].nodes.filter((n) => n.kind === "block"); }

  flip(id, all) {
    if (all !== undefined) this.open = new Set(all ? this.runs().map((n) => n.id) : []);
    else if (!this.open.delete(id)) this.open.add(id);
    this.flipped();
  }

  flipped() {
    this.touched = true;
    this.draw();
    if (!this.moved) this.fit();
    this.tell();
  }

  // One message holds all, so that no part of it can be older than another. Opening blocks tells Python a moment later.
  tell(wait = 500) {
    clearTimeout(this.timer);
    // `at` makes two equal choices two messages
    const say = () => this.send("view", { at: Date.now(), selected: this.selected, open: this.touched ? [...this.open] : null, show: this.show });
    if (wait) this.timer = setTimeout(say, wait); else say();
  }

  // --- pan and zoom ------------------------------------------------------------------------------

  // From afar, where words are under four pixels high, they and the arrow heads are left out: drawing them is most of a frame.
  place() {
    this.world.setAttribute("transform", `translate(${this.view.x} ${this.view.y}) scale(${this.view.k})`);
    this.world.classList.toggle("far", this.view.k < 0.3);
  }

  fit() {
    const { clientWidth: w, clientHeight: h } = this.canvas;
    if (!w || !h || !this.world.childElementCount) return;
    const box = this.world.getBBox(), across = (w - 32) / box.width, k = Math.min(1.25, across, (h - 32) / box.height);
    const scale = Math.max(k, Math.min(0.7, across)); // rather cut off below than unreadably small
    this.view = { k: scale, x: w / 2 - (box.x + box.width / 2) * scale,
                  y: k < scale ? 16 - box.y * scale : h / 2 - (box.y + box.height / 2) * scale };
    this.moved = false;
    this.place();
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const k = Math.min(4, Math.max(0.05, this.view.k * factor)), f = k / this.view.k;
    this.view = { k, x: x - (x - this.view.x) * f, y: y - (y - this.view.y) * f };
    this.moved = true;
    this.place();
  }

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
    const c = this.canvas;
    let from = null;
    c.onpointerdown = (e) => { if (e.button === 0) from = { x: e.clientX, y: e.clientY, vx: this.view.x, vy: this.view.y, drag: false, target: e.target }; };
    c.onpointermove = (e) => {
      if (!from) return this.hover(e);
      const dx = e.clientX - from.x, dy = e.clientY - from.y;
      if (!from.drag && Math.hypot(dx, dy) > 4) { from.drag = true; c.setPointerCapture(e.pointerId); c.classList.add("moving"); this.card.hidden = true; }
      if (from.drag) { this.view.x = from.vx + dx; this.view.y = from.vy + dy; this.moved = true; this.place(); }
    };
    c.onpointerup = (e) => { const was = from; from = null; c.classList.remove("moving"); if (was && !was.drag) this.click(was.target, e.shiftKey); };
    c.onpointercancel = () => { from = null; };
    c.onpointerleave = () => { this.card.hidden = true; point(""); };
    c.ondblclick = (e) => { const g = e.target.closest(".node.block"); if (g) this.flip(g.dataset.id); };
    c.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey && this.root.activeElement !== c) return; // the page scrolls until the graph has been clicked
      e.preventDefault();
      const box = c.getBoundingClientRect();
      this.zoom(Math.exp(-e.deltaY * 0.0015), e.clientX - box.left, e.clientY - box.top);
    }, { passive: false });
    c.onkeydown = (e) => this.key_(e);
    this.input.oninput = () => this.search();
    this.input.onkeydown = (e) => { if (e.key === "Enter") { e.preventDefault(); this.visit(e.shiftKey ? -1 : 1); } };
    this.select.onchange = () => { this.show = this.select.value; this.draw(); this.tell(); };
    this.root.querySelector(".tools").onclick = (e) => this.command(e.target.dataset?.do);
  }

  command(name) {
    ({ previous: () => this.visit(-1), next: () => this.visit(1), open: () => this.flip("", true), close: () => this.flip("", false),
       out: () => this.zoom(0.8), in: () => this.zoom(1.25), fit: () => this.fit(), svg: () => saveSvg(this), png: () => savePng(this), kind: () => this.flipKind(this.block()?.scope) })[name]?.();
  }

  click(target, alike) {
    const toggle = target.closest?.("[data-toggle]"), node = target.closest?.(".node");
    if (toggle) return this.turn(toggle.dataset.toggle, alike);
    if (node && !node.classList.contains("port")) this.pick(node.dataset.id);
  }

  // Open or close one block, or all of its kind.
  turn(id, alike) {
    if (alike) this.flipKind(this.runs().find((n) => n.id === id)?.scope, id); else this.flip(id);
  }

  key_(e) {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[e.key];
    const stops = this.shapes.filter((s) => s.n.kind !== "port").sort((a, b) => a.y - a.h / 2 - (b.y - b.h / 2) || a.x - b.x);
    if (step && stops.length) {
      const at = stops.findIndex((s) => s.n.id === this.selected);
      const id = stops[(at + step + stops.length) % stops.length].n.id;
      this.pick(id); this.centre(id);
    } else if (e.key === "Enter" || e.key === " ") {
      const s = stops.find((shape) => shape.n.id === this.selected);
      if (s?.n.kind === "block") this.turn(s.n.id, e.shiftKey);
    } else if (e.key === "+" || e.key === "=") this.zoom(1.25);
    else if (e.key === "-") this.zoom(0.8);
    else if (e.key === "0") this.fit();
    else if (e.key === "Escape") this.pick("");
    else return;
    e.preventDefault();
  }

  hover(e) {
    const g = e.target.closest?.(".node"), shape = g && this.shapes.find((s) => s.g === g);
    point(shape && shape.n.kind !== "port" ? shape.n.id : "");
    if (!shape || shape.n.kind === "port") return void (this.card.hidden = true);
    this.card.replaceChildren();
    const title = document.createElement("b"), list = document.createElement("dl");
    title.textContent = shape.n.label;
    const axes = this.data.overlay.placement[shape.n.id] || [];
    const { memory, flops } = this.data.overlay, id = shape.n.id;
    const lines = [...(shape.n.facts || []), ...(flops?.nodes[id]?.[0] ? [["work of one GPU", `${flops.nodes[id][0]} forward`]] : []),
                   ...(memory?.nodes[id]?.[0] ? [["memory of one GPU", memory.nodes[id][0]]] : []), ...axes.map((a) => [`${a.of} on ${a.axis}`, a.p]),
                   ...this.sent(shape.n.id).map((m) => [m.kind, `${m.count > 1 ? `${m.count} × ` : ""}${m.text} on ${m.axis}`])];
    if (this.data.bare?.[id]) lines.push(["no rule", this.data.bare[id].replace(/^no rule /, "")]);
    if (this.data.marks?.[shape.n.id]) lines.push([`in ${this.data.other}`, this.data.marks[shape.n.id]]);
    for (const [key, value] of lines) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = key; dd.textContent = value; list.append(dt, dd);
    }
    this.card.append(title, list);
    this.card.hidden = false;
    const box = this.canvas.parentElement.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
    this.card.style.left = `${Math.max(4, x + 316 > box.width ? x - 16 - this.card.offsetWidth : x + 16)}px`;
    this.card.style.top = `${Math.max(4, Math.min(y + 12, box.height - this.card.offsetHeight - 6))}px`;
  }
}

// Tell the other drawings and tables of the page what the pointer is on (weights.js does the same).
let pointed = "";
function point(id) {
  if (id !== pointed) window.dispatchEvent(new CustomEvent("shardscope:node", { detail: (pointed = id) }));
}
