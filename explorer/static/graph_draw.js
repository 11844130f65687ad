// What the graph draws where: the nodes and edges of every scope, moved apart where a block is open, and the overlays.
// One source with graph_save.js and graph.js: Python joins them in this order.

const SVG = "http://www.w3.org/2000/svg";
const HEADER = 34, PAD = 16;

function make(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent?.appendChild(element);
  return element;
}

class Drawing {
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

  // Blocks of one row push together; of rows above each other, whose blocks may share the room, the strongest push counts.
  push([x, y], pushes) {
    const rows = new Map();
    for (const p of pushes) {
      const row = rows.get(p.y) || { dx: 0, dy: 0 };
      if (x <= p.left + 0.5) row.dx -= p.dw / 2;
      else if (x >= p.right - 0.5) row.dx += p.dw / 2;
      if (y >= p.bottom - 0.5) row.dy = Math.max(row.dy, p.dh);
      rows.set(p.y, row);
    }
    let left = 0, right = 0, down = 0;
    for (const { dx, dy } of rows.values()) { left = Math.min(left, dx); right = Math.max(right, dx); down += dy; }
    return [x + left + right, y + down];
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
    this.bare(g, n, x + n.w / 2 - 3, y + n.h / 2 - 3);
  }

  // A node that differs from the other graph's wears a diamond with ≠ at its corner and a broken outline; a closed block counts its own.
  differing(n) { return (this.data.marks?.[n.id] ? 1 : 0) + (n.scope ? this.scopeOf(n).nodes.filter((m) => this.data.marks?.[m.id]).length : 0); }

  // An op without a rule wears an exclamation mark at its lower right corner, and so does a closed block with one inside.
  bare(g, n, x, y) {
    const known = this.data.bare || {};
    if (!known[n.id] && !(n.scope && this.scopeOf(n).nodes.some((m) => known[m.id]))) return;
    const b = make("g", { class: "bare" }, g);
    make("rect", { x: x - 7, y: y - 8, width: 14, height: 16, rx: 3 }, b);
    make("text", { x, y: y + 4.5 }, b, "!");
  }

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

  heat(id) { return this.show === "memory" || this.show === "flops" ? this.data.overlay[this.show]?.nodes[id] || ["", 0] : null; }

  second(n) {
    if (this.show === "placement") return this.data.overlay.placement[n.id] || n.sub;
    if (this.heat(n.id)) return this.heat(n.id)[0];
    if (this.show === "forward" || this.show === "backward") {
      const sent = this.sent(n.id);
      if (!sent.length) return n.kind === "block" ? n.sub : "";
      return sent.length === 1 ? `${sent[0].kind} ${sent[0].text}` : `${sent[0].kind} +${sent.length - 1} more`;
    }
    return n.sub;
  }

  tint(n, body) {
    if (this.heat(n.id)) body.style.fill = this.shade(this.heat(n.id)[1]);
    if (this.sent(n.id).length) { body.style.stroke = "#D55E00"; body.style.strokeWidth = 2; }
  }

  shade(share) {
    return `color-mix(in srgb, ${this.show === "memory" ? "#009E73" : "#0072B2"} ${Math.round(6 + 60 * share)}%, var(--st-background-color))`;
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

  // What the legend says: entries of words with a mark before them; the page and a saved picture draw the same ones.
  keys() {
    const { words, ...overlay } = this.data.overlay, found = [];
    if (this.show === "placement") found.push(
      { mark: "grey", text: "R: whole on every device" }, { mark: "slices", text: "S(d): split along dim d" }, { mark: "stripes", text: "P: terms not summed yet" });
    for (const [share, text] of (this.heat("") && overlay[this.show]?.scale) || []) found.push({ mark: "shade", fill: this.shade(share), text });
    if (this.show === "forward" || this.show === "backward") found.push({ mark: "line", text: "sends" });
    if (words?.[this.show]) found.push({ text: words[this.show] });
    if (Object.keys(this.data.bare || {}).length) found.push({ mark: "bare", text: "no rule: runs whole on every GPU" });
    if (this.data.other) found.push({ mark: "diamond", text: `≠ otherwise in ${this.data.other}` });
    return found;
  }

  drawLegend() {
    this.legend.replaceChildren(...this.keys().map(({ mark, fill, text }) => {
      const span = document.createElement("span");
      if (mark) {
        const i = span.appendChild(document.createElement("i"));
        i.className = mark;
        if (mark === "bare") i.textContent = "!";
        if (fill) i.style.background = fill;
      }
      span.append(text);
      return span;
    }));
    this.legend.hidden = !this.legend.childElementCount;
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
