// The model graph as SVG. Python sends positions; here nothing is laid out, only moved apart where a block is opened.
// data = {key, scene, overlay: {placement, messages}, devices, selected, open, show, marks: {id: how it is in the other graph}, other}
// Sends back: view = {selected, open (null until a block was opened or closed by hand), show}; pan, zoom, hover and search stay in the browser.

const SVG = "http://www.w3.org/2000/svg";
const HEADER = 34, PAD = 16, INDENT = 26;
const instances = new WeakMap();

export default function (component) {
  const root = component.parentElement;
  let graph = instances.get(root);
  if (!graph || !root.contains(graph.canvas)) {
    graph = new Graph(root);
    instances.set(root, graph);
  }
  graph.update(component);
  return () => { graph.observer.disconnect(); clearTimeout(graph.timer); instances.delete(root); };
}

function make(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent?.appendChild(element);
  return element;
}

class Graph {
  constructor(root) {
    const find = (selector) => root.querySelector(selector);
    this.root = root;
    this.canvas = find(".canvas"); this.world = find(".world"); this.card = find(".card");
    this.legend = find(".legend"); this.said = find(".said"); this.count = find(".matches");
    this.input = find("input"); this.select = find("select");
    this.view = { x: 0, y: 0, k: 1 };
    this.open = new Set(); this.show = "graph"; this.matches = []; this.at = -1;
    this.selected = ""; this.given = ""; this.echoes = [];
    this.listen();
    this.observer = new ResizeObserver(() => { if (!this.moved) this.fit(); });
    this.observer.observe(this.canvas);
  }

  update({ data, setStateValue }) {
    this.send = setStateValue;
    const fresh = data.key !== this.key;
    this.data = data; this.scene = data.scene; this.key = data.key;
    if (fresh || data.asked !== this.asked) {
      this.open = new Set(data.open); this.touched = false; this.show = data.show; this.asked = data.asked;
      this.moved = this.moved && !fresh;
    }
    else if (data.other) this.join(data);
    this.told = [String(data.open), data.show];
    const led = this.follow(data.selected || "", fresh) && data.other;
    this.select.value = this.show;
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

  // --- what is drawn where ---------------------------------------------------------------------

  scopeOf(node) { return this.scene.scopes[node.scope]; }

  // An open block is larger than its closed box: everything right of it, left of it and below it gives way.
  pushes() {
    return this.scene.scopes[""].nodes.filter((n) => n.kind === "block" && this.open.has(n.id)).map((n) => {
      const s = this.scopeOf(n);
      return { left: n.x - n.w / 2, right: n.x + n.w / 2, bottom: n.y + n.h / 2, y: n.y,
               dw: Math.max(0, s.w + 2 * PAD - n.w), dh: Math.max(0, s.h + HEADER + PAD - n.h) };
    });
  }

  push([x, y], pushes) {
    const rows = new Map();
    let dx = 0;
    for (const p of pushes) {
      if (x <= p.left + 0.5) dx -= p.dw / 2;
      else if (x >= p.right - 0.5) dx += p.dw / 2;
      if (y >= p.bottom - 0.5) rows.set(p.y, Math.max(rows.get(p.y) || 0, p.dh));
    }
    return [x + dx, y + [...rows.values()].reduce((a, b) => a + b, 0)];
  }

  draw() {
    this.world.replaceChildren();
    this.shapes = [];
    const pushes = this.pushes(), top = this.scene.scopes[""];
    for (const n of top.nodes) if (n.kind === "block" && this.open.has(n.id)) this.drawOpen(n, pushes);
    this.drawWires(top, (p) => this.push(p, pushes));
    for (const n of top.nodes) if (!(n.kind === "block" && this.open.has(n.id))) {
      const [x, y] = this.push([n.x, n.y], pushes);
      this.drawNode(n, x, y);
    }
    this.mark();
    this.drawLegend();
  }

  drawOpen(n, pushes) {
    const s = this.scopeOf(n), [x] = this.push([n.x, n.y], pushes), [, y] = this.push([n.x, n.y - n.h / 2], pushes);
    const w = Math.max(n.w, s.w + 2 * PAD), h = s.h + HEADER + PAD;
    const g = this.group(n, x, y + h / 2, w, h);
    g.classList.add("opened");
    make("rect", { class: "body", x: x - w / 2, y, width: w, height: h, rx: 10 }, g);
    make("text", { class: "label", x, y: y + 21 }, g, n.label);
    this.toggle(g, n, x + w / 2 - 16, y + 17, "–");
    this.badge(g, n, x - w / 2, y);
    const move = ([a, b]) => [a + x - s.w / 2, b + y + HEADER];
    this.drawWires(s, move);
    for (const inner of s.nodes) { const [a, b] = move([inner.x, inner.y]); this.drawNode(inner, a, b, n); }
  }

  group(n, x, y, w, h) {
    const g = make("g", { class: `node ${n.kind}`, "data-id": n.id }, this.world);
    this.shapes.push({ n, g, x, y, w, h });
    return g;
  }

  drawNode(n, x, y, parent) {
    const g = this.group(n, x, y, n.w, n.h);
    g.dataset.parent = parent ? parent.id : "";
    const body = make("rect", { class: "body", x: x - n.w / 2, y: y - n.h / 2, width: n.w, height: n.h, rx: 6 }, g);
    if (n.kind === "port") return void make("text", { class: "sub", x, y: y + 4 }, g, n.label);
    this.tint(n, body);
    const second = this.second(n);
    make("text", { class: "label", x, y: y + (second === "" ? 4.5 : -3) }, g, n.label);
    if (Array.isArray(second)) this.bars(g, second, x, y, n.w);
    else if (second) make("text", { class: "sub", x, y: y + 11.5 }, g, second);
    if (n.kind === "block") this.toggle(g, n, x + n.w / 2 - 2, y - n.h / 2 + 2, "+");
    this.badge(g, n, x - n.w / 2, y - n.h / 2);
  }

  // A node that differs from the other graph's wears a diamond with ≠ at its corner and a broken outline; a closed block counts its own.
  differing(n) { return (this.data.marks?.[n.id] ? 1 : 0) + (n.scope ? this.scopeOf(n).nodes.filter((m) => this.data.marks?.[m.id]).length : 0); }

  badge(g, n, x, y) {
    const count = this.differing(n);
    if (!count) return;
    if (this.data.marks[n.id]) g.classList.add("differs");
    const b = make("g", { class: "badge" }, g);
    make("rect", { x: x - 8, y: y - 8, width: 16, height: 16, transform: `rotate(45 ${x} ${y})` }, b);
    make("text", { x, y: y + 4.5 }, b, n.scope && count > 1 ? `${count}` : "≠");
  }

  toggle(g, n, x, y, sign) {
    const t = make("g", { class: "toggle", "data-toggle": n.id }, g);
    make("rect", { x: x - 9, y: y - 9, width: 18, height: 18, rx: 5 }, t);
    make("text", { x, y: y + 5 }, t, sign);
  }

  drawWires(scope, move) {
    for (const [src, dst, flat] of scope.wires) {
      const points = [];
      for (let i = 0; i < flat.length; i += 2) points.push(move([flat[i], flat[i + 1]]));
      const lane = flat.some((v, i) => i % 2 && i > 2 && v === flat[i - 2]);
      const sent = this.sent(src).filter((m) => m.where === "after");
      const wire = make("path", { class: `wire${lane ? " lane" : ""}${sent.length ? " sends" : ""}`,
        d: lane ? rounded(points) : curved(points), "data-src": src, "data-dst": dst }, this.world);
      if (sent.length) wire.style.strokeWidth = thickness(sent.reduce((a, m) => a + m.bytes * m.count, 0));
    }
  }

  // --- overlays ----------------------------------------------------------------------------------

  sent(id) {
    if (this.show !== "forward" && this.show !== "backward") return [];
    return (this.data.overlay.messages[id] || []).filter((m) => m.phase === this.show);
  }

  second(n) {
    if (this.show === "placement") return this.data.overlay.placement[n.id] || n.sub;
    if (this.show === "memory") return n.memory_text || "";
    if (this.show === "flops") return n.flops_text || "";
    if (this.show === "forward" || this.show === "backward") {
      const sent = this.sent(n.id);
      if (!sent.length) return n.kind === "block" ? n.sub : "";
      return sent.length === 1 ? `${sent[0].kind} ${sent[0].text}` : `${sent[0].kind} … ${sent.length} messages`;
    }
    return n.sub;
  }

  tint(n, body) {
    const heat = this.show === "memory" ? n.memory_share : this.show === "flops" ? n.flops_share : 0;
    if (this.show === "memory" || this.show === "flops")
      body.style.fill = `color-mix(in srgb, ${this.show === "memory" ? "#009E73" : "#0072B2"} ${Math.round(6 + 60 * Math.sqrt(heat || 0))}%, var(--st-background-color))`;
    if (this.sent(n.id).length) { body.style.stroke = "#D55E00"; body.style.strokeWidth = 2; }
  }

  // one bar per mesh axis: grey where whole, slices in device colours where split, hatched where not summed
  bars(g, axes, x, y, width) {
    const cell = (width - 12) / axes.length, top = y + 4;
    axes.forEach((axis, i) => {
      const left = x - width / 2 + 6 + i * cell, letters = axis.p.length > 1 ? 22 : 9, w = Math.max(10, cell - letters - 8);
      if (axis.p.startsWith("S")) {
        const n = Math.min(axis.n, this.data.devices.length), one = w / n;
        for (let d = 0; d < n; d++)
          make("rect", { x: left + d * one, y: top, width: Math.max(0.5, one - 0.8), height: 9, fill: this.data.devices[d] }, g);
      } else make("rect", { class: axis.p === "P" ? "partial" : "whole", x: left, y: top, width: w, height: 9, rx: 1.5 }, g);
      make("text", { class: "letter", x: left + w + 3, y: top + 8.5 }, g, axis.p);
    });
  }

  drawLegend() {
    const keys = { placement: [["grey", "R: whole on every device"], ["slices", "S(d): split along dim d"], ["stripes", "P: terms not summed yet"]] }[this.show] || [];
    this.legend.replaceChildren();
    const axes = this.show === "placement" ? this.data.overlay.axes : "";
    const words = { memory: "weights and what is kept for backward, whole tensors", flops: "forward work, whole tensors",
                    forward: this.data.overlay.plan, backward: this.data.overlay.plan }[this.show];
    for (const [cls, text] of keys) this.entry(text, cls);
    if (axes) this.entry(axes);
    if (words) this.entry(words);
    if (this.data.other) this.entry(`≠ otherwise in ${this.data.other}`, "diamond");
    this.legend.hidden = !this.legend.childElementCount;
  }

  entry(text, cls) {
    const span = document.createElement("span");
    if (cls) { const i = document.createElement("i"); i.className = cls; span.appendChild(i); }
    span.append(text);
    this.legend.appendChild(span);
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
  }

  pick(id) {
    this.selected = id;
    this.mark();
    const shape = this.shapes.find((s) => s.n.id === id);
    this.echoes.push(id);
    const differs = this.data.marks?.[id];
    this.said.textContent = shape ? `${shape.n.label}, ${shape.n.sub}${differs ? `, differs: ${differs} in ${this.data.other}` : ""}` : "nothing selected";
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

  flip(id, all) {
    if (all !== undefined) this.open = new Set(all ? this.scene.scopes[""].nodes.filter((n) => n.kind === "block").map((n) => n.id) : []);
    else if (!this.open.delete(id)) this.open.add(id);
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
    c.onpointerup = () => { const was = from; from = null; c.classList.remove("moving"); if (was && !was.drag) this.click(was.target); };
    c.onpointercancel = () => { from = null; };
    c.onpointerleave = () => { this.card.hidden = true; };
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
       out: () => this.zoom(0.8), in: () => this.zoom(1.25), fit: () => this.fit(), svg: () => this.saveSvg(), png: () => this.savePng() })[name]?.();
  }

  click(target) {
    const toggle = target.closest?.("[data-toggle]"), node = target.closest?.(".node");
    if (toggle) return this.flip(toggle.dataset.toggle);
    if (node && !node.classList.contains("port")) this.pick(node.dataset.id);
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
      if (s?.n.kind === "block") this.flip(s.n.id);
    } else if (e.key === "+" || e.key === "=") this.zoom(1.25);
    else if (e.key === "-") this.zoom(0.8);
    else if (e.key === "0") this.fit();
    else if (e.key === "Escape") this.pick("");
    else return;
    e.preventDefault();
  }

  hover(e) {
    const g = e.target.closest?.(".node"), shape = g && this.shapes.find((s) => s.g === g);
    if (!shape || shape.n.kind === "port") return void (this.card.hidden = true);
    this.card.replaceChildren();
    const title = document.createElement("b"), list = document.createElement("dl");
    title.textContent = shape.n.label;
    const axes = this.data.overlay.placement[shape.n.id] || [];
    const lines = [...(shape.n.facts || []), ...axes.map((a) => [`${a.of} on ${a.axis}`, a.p]),
                   ...this.sent(shape.n.id).map((m) => [m.kind, `${m.count > 1 ? `${m.count} × ` : ""}${m.text} on ${m.axis}`])];
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

  // The drawing as it stands, whole, with the page's colours and fonts written into it.
  still() {
    this.world.classList.remove("far");
    const copy = this.canvas.cloneNode(true), box = this.world.getBBox();
    const live = this.canvas.querySelectorAll("*"), still = copy.querySelectorAll("*");
    const keep = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor", "opacity", "marker-end"];
    live.forEach((element, i) => { const style = getComputedStyle(element); for (const k of keep) still[i].style.setProperty(k, style.getPropertyValue(k)); });
    copy.querySelector(".world").removeAttribute("transform");
    const width = Math.ceil(box.width + 32), height = Math.ceil(box.height + 32);
    copy.setAttribute("viewBox", [box.x - 16, box.y - 16, width, height].join(" "));
    copy.setAttribute("width", width); copy.setAttribute("height", height);
    copy.setAttribute("xmlns", SVG);
    this.place();
    return { text: new XMLSerializer().serializeToString(copy), width, height };
  }

  keep(blob, suffix) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `${this.scene.title}.${suffix}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  saveSvg() { this.keep(new Blob([this.still().text], { type: "image/svg+xml" }), "svg"); }

  // Two dots a pixel, fewer where the picture would be larger than browsers draw.
  savePng() {
    const { text, width, height } = this.still(), most = 16384, k = Math.min(2, most / width, most / height, Math.sqrt(1e8 / (width * height)));
    const image = new Image(), page = document.createElement("canvas");
    page.width = Math.round(width * k); page.height = Math.round(height * k);
    image.onload = () => {
      const pen = page.getContext("2d");
      pen.fillStyle = getComputedStyle(this.root.querySelector(".graph")).backgroundColor;
      pen.fillRect(0, 0, page.width, page.height);
      pen.drawImage(image, 0, 0, page.width, page.height);
      page.toBlob((blob) => { if (blob) this.keep(blob, "png"); else this.said.textContent = "The picture is too large for a PNG; take the SVG."; });
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  }
}

function curved(points) {
  let d = `M${points[0]}`;
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]], m = (y0 + y1) / 2;
    d += x0 === x1 ? `L${x1},${y1}` : `C${x0},${m} ${x1},${m} ${x1},${y1}`;
  }
  return d;
}

function rounded(points) { // right angles with corners of radius 8
  let d = `M${points[0]}`;
  for (let i = 1; i < points.length - 1; i++) {
    const [a, b, c] = [points[i - 1], points[i], points[i + 1]];
    const r = Math.min(8, Math.hypot(b[0] - a[0], b[1] - a[1]) / 2, Math.hypot(c[0] - b[0], c[1] - b[1]) / 2);
    const toward = (p) => { const l = Math.hypot(p[0] - b[0], p[1] - b[1]) || 1; return [b[0] + (p[0] - b[0]) / l * r, b[1] + (p[1] - b[1]) / l * r]; };
    d += `L${toward(a)}Q${b} ${toward(c)}`;
  }
  return d + `L${points[points.length - 1]}`;
}

function thickness(bytes) { return Math.min(7, 1.5 + Math.log10(1 + bytes / 1e5) * 1.1); }
