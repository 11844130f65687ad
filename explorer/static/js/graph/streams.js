// The steps of plans as streams of work on one axis of time, on a canvas. Python sends the work (StreamsData of types.d.ts);
// here it is only scaled. Pan, zoom and hover stay in the browser.

/** @typedef {import("../types").StreamsData} StreamsData */
/** @typedef {import("../types").StreamWork} StreamWork */
/** @typedef {{ top: number, plan: number, name: string, first: boolean, works: StreamWork[] }} Lane */

const LEFT = 92;
const AXIS = 26;
const TITLE = 24;
const LANE = 24;
const BAR = 20;
const GAP = 10;
const PALE = 0.55;
const LEAST_S = 2e-7;
const DIM = 0.15;
const LABEL = 34;
const START = 3;
const LONG = 4;
const GROUP = 8;

/** @type {WeakMap<ParentNode, Streams>} */
const instances = new WeakMap();

/** @param {import("../types").Component<StreamsData>} component */
export default function ({ data, parentElement }) {
  let streams = instances.get(parentElement);
  if (!streams || !parentElement.contains(streams.canvas)) {
    streams = new Streams(parentElement);
    instances.set(parentElement, streams);
  }
  streams.update(data);
  const shown = streams;
  return () => {
    shown.end();
    instances.delete(parentElement);
  };
}

/** Seconds as people read them.
 * @param {number} s
 */
function seconds(s) {
  const small = s >= 1e-4 ? ["ms", 1e3] : ["µs", 1e6];
  const [unit, size] = /** @type {[string, number]} */ (s >= 1 ? ["s", 1] : small);
  return `${Number((s * size).toPrecision(3))} ${unit}`;
}

class Streams {
  /** @param {ShadowRoot} root */
  constructor(root) {
    const find = (/** @type {string} */ s) => /** @type {HTMLElement} */ (root.querySelector(s));
    this.box = find(".streams");
    this.canvas = /** @type {HTMLCanvasElement} */ (find("canvas"));
    this.card = find(".card");
    this.legend = find(".legend");
    /** @type {StreamsData | null} */
    this.data = null;
    /** @type {Lane[]} */
    this.lanes = [];
    this.from = 0;
    this.to = 1;
    this.stamp = "";
    this.frame = 0;
    /** The plan and the micro-batch that stand out.
     * @type {number[]} */
    this.marked = [];
    this.press = { on: false, x: 0, from: 0, to: 0, moved: false };
    this.listen();
  }

  listen() {
    const on = (/** @type {string} */ kind, /** @type {(e: any) => void} */ f, /** @type {boolean} */ passive = true) =>
      this.canvas.addEventListener(kind, f, { passive });
    on("wheel", (e) => this.wheel(e), false);
    on("pointerdown", (e) => this.down(e));
    on("pointermove", (e) => this.move(e));
    on("pointerup", (e) => this.up(e));
    on("pointerleave", () => this.hide());
    on("keydown", (e) => this.key(e), false);
    this.box.addEventListener("click", (e) => {
      const what = e.target instanceof HTMLElement ? e.target.dataset.do : undefined;
      if (what) this.act(what);
    });
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.canvas);
  }

  end() {
    this.watch?.disconnect();
    cancelAnimationFrame(this.frame);
  }

  /** @param {StreamsData} data */
  update(data) {
    this.data = data;
    const stamp = data.plans.map((p) => `${p.name} ${p.step_s} ${p.works.length}`).join("; ");
    if (stamp !== this.stamp) this.show(0, this.longest() * 1.02);
    this.stamp = stamp;
    this.lay();
    this.canvas.setAttribute("aria-label", data.alt);
    this.legend.replaceChildren(...data.kinds.filter((k) => k.words).map((k) => this.entry(k)));
    this.draw();
  }

  /** @param {StreamsData["kinds"][number]} kind */
  entry(kind) {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.style.background = kind.colour;
    if (kind.pale) swatch.style.opacity = String(PALE);
    if (kind.hatch) swatch.className = "hatch";
    item.append(swatch, kind.words);
    return item;
  }

  longest() {
    return Math.max(...(this.data?.plans ?? []).map((p) => p.step_s), 1e-9);
  }

  /** Where the lanes lie. */
  lay() {
    this.lanes = [];
    let top = AXIS;
    (this.data?.plans ?? []).forEach((plan, p) => {
      top += TITLE;
      plan.lanes.forEach((name, s) => {
        this.lanes.push({ top, plan: p, name, first: s === 0, works: plan.works.filter((w) => w[0] === s) });
        top += LANE;
      });
      top += GAP;
    });
    this.canvas.style.height = `${top}px`;
  }

  // --- what is seen ---------------------------------------------------------------------------------

  /** @param {number} from @param {number} to */
  show(from, to) {
    const most = this.longest() * 1.02;
    const wide = Math.min(Math.max(to - from, LEAST_S), most);
    this.from = Math.min(Math.max(from, 0), most - wide);
    this.to = this.from + wide;
    this.draw();
  }

  /** @param {number} factor @param {number} at */
  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  /** @param {string} what */
  act(what) {
    if (what === "whole") {
      this.marked = [];
      this.show(0, this.longest() * 1.02);
    }
    if (what === "in") this.zoom(0.5);
    if (what === "out") this.zoom(2);
    if (what === "part") {
      const parts = this.lanes[0]?.works ?? [];
      const at = (this.from + this.to) / 2;
      const inside = parts.filter((w) => w[START] >= (this.to - this.from > this.longest() / 2 ? 0 : at));
      const one = inside.find((w) => (this.data?.words[w[2]] ?? "").includes(" of ")) ?? inside[0];
      if (one && this.lanes[0]) this.open(one, this.lanes[0].plan);
    }
  }

  /** Shows one part of the model; of a plan with stages one micro-batch on its way through all of them.
   * @param {StreamWork} work @param {number} plan
   */
  open(work, plan) {
    const known = this.data?.plans[plan];
    const group = known?.staged ? known.works.filter((w) => w[GROUP] === work[GROUP] && w[GROUP] > 0) : [work];
    const all = group.length ? group : [work];
    const from = Math.min(...all.map((w) => w[START]));
    const to = Math.max(...all.map((w) => w[START] + w[LONG]));
    this.marked = known?.staged && group.length ? [plan, work[GROUP]] : [];
    const margin = (to - from) * 0.04;
    this.show(from - margin, to + margin);
  }

  width() {
    return Math.max(this.canvas.clientWidth - LEFT, 50);
  }

  /** @param {number} s */
  x(s) {
    return LEFT + ((s - this.from) / (this.to - this.from)) * this.width();
  }

  /** @param {number} x */
  at(x) {
    return this.from + ((x - LEFT) / this.width()) * (this.to - this.from);
  }

  // --- the hands --------------------------------------------------------------------------------------

  /** @param {WheelEvent} e */
  wheel(e) {
    if (!e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    this.zoom(Math.exp(e.deltaY * 0.003), this.at(e.offsetX));
  }

  /** @param {PointerEvent} e */
  down(e) {
    this.press = { on: true, x: e.offsetX, from: this.from, to: this.to, moved: false };
    this.canvas.setPointerCapture(e.pointerId);
    this.canvas.classList.add("held");
    this.hide();
  }

  /** @param {PointerEvent} e */
  move(e) {
    const { on, x, from, to } = this.press;
    if (!on) {
      this.hover(e.offsetX, e.offsetY);
      return;
    }
    if (Math.abs(e.offsetX - x) > 3) this.press.moved = true;
    const by = ((e.offsetX - x) / this.width()) * (to - from);
    if (this.press.moved) this.show(from - by, to - by);
  }

  /** @param {PointerEvent} e */
  up(e) {
    const moved = this.press.moved;
    this.press.on = false;
    this.canvas.classList.remove("held");
    if (moved) return;
    const lane = this.laneAt(e.offsetY);
    const found = this.find(e.offsetX, e.offsetY);
    if (lane && found && (lane.first || this.data?.plans[lane.plan]?.staged)) this.open(found, lane.plan);
  }

  /** @param {KeyboardEvent} e */
  key(e) {
    const wide = this.to - this.from;
    /** @type {Record<string, () => void>} */
    const keys = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.act("whole"),
      ArrowLeft: () => this.show(this.from - wide / 5, this.to - wide / 5),
      ArrowRight: () => this.show(this.from + wide / 5, this.to + wide / 5),
    };
    const act = keys[e.key];
    if (!act || e.ctrlKey || e.metaKey) return;
    e.preventDefault();
    act();
  }

  /** @param {number} y */
  laneAt(y) {
    return this.lanes.find((l) => y >= l.top && y < l.top + BAR);
  }

  /** The work under a point.
   * @param {number} x @param {number} y
   */
  find(x, y) {
    const lane = this.laneAt(y);
    if (!lane || x < LEFT) return undefined;
    const slack = (this.to - this.from) / this.width();
    const at = this.at(x);
    return lane.works.find((w) => w[START] - slack <= at && at <= w[START] + w[LONG] + slack);
  }

  /** @param {number} x @param {number} y */
  hover(x, y) {
    const found = this.find(x, y);
    if (!found || !this.data) {
      this.hide();
      return;
    }
    const { kinds, words } = this.data;
    const name = document.createElement("b");
    name.textContent = words[found[5]] ?? "";
    const lines = [`${kinds[found[1]]?.told ?? ""}: ${seconds(found[LONG])}`, words[found[2]], words[found[6]]];
    this.card.replaceChildren(name);
    for (const line of lines.filter(Boolean)) {
      const row = document.createElement("span");
      row.textContent = line ?? "";
      this.card.append(row, document.createElement("br"));
    }
    this.card.hidden = false;
    const top = this.canvas.offsetTop;
    const left = x + 14 + this.card.offsetWidth > this.canvas.clientWidth ? x - 14 - this.card.offsetWidth : x + 14;
    this.card.style.left = `${Math.max(0, left)}px`;
    this.card.style.top = `${top + y + 16}px`;
  }

  hide() {
    this.card.hidden = true;
  }

  // --- drawing ----------------------------------------------------------------------------------------

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    const data = this.data;
    const ctx = this.canvas.getContext("2d");
    const [w, h] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!data || !ctx || !w) return;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = w * ratio;
    this.canvas.height = h * ratio;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    const look = getComputedStyle(this.box);
    ctx.font = `12.5px ${look.fontFamily}`;
    ctx.textBaseline = "middle";
    this.axis(ctx, look.color, h);
    this.lanes.forEach((lane) => {
      const plan = data.plans[lane.plan];
      ctx.fillStyle = look.color;
      if (lane.first && plan) {
        ctx.font = `600 13.5px ${look.fontFamily}`;
        ctx.fillText(`${plan.name}: ${plan.told}`, 0, lane.top - TITLE / 2);
        ctx.font = `12.5px ${look.fontFamily}`;
      }
      ctx.fillText(lane.name, 0, lane.top + BAR / 2);
      this.works(ctx, lane, look.color);
    });
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Lane} lane @param {string} ink */
  works(ctx, lane, ink) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, lane.top, this.width(), BAR);
    ctx.clip();
    for (const work of lane.works) {
      if (work[START] + work[LONG] >= this.from && work[START] <= this.to) this.work(ctx, lane, work, ink);
    }
    ctx.restore();
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Lane} lane @param {StreamWork} work @param {string} ink */
  work(ctx, lane, work, ink) {
    const { top } = lane;
    const kind = this.data?.kinds[work[1]];
    const left = this.x(work[START]);
    const wide = this.x(work[START] + work[LONG]) - left;
    const plain = work[7] ? 0.1 : 0.2;
    const full = kind?.pale ? PALE : 1;
    const [plan, group] = this.marked;
    const dim = plan !== lane.plan || group === work[GROUP] ? 1 : DIM; // beside what stands out
    ctx.globalAlpha = (kind?.colour ? full : plain) * dim;
    ctx.fillStyle = kind?.hatch ? hatched(ctx, ink) : kind?.colour || ink;
    if (kind?.hatch) ctx.globalAlpha = 0.35 * dim;
    // Thinner than a pixel it would fade into the page; work that follows at once is drawn over what is too much.
    ctx.fillRect(left, top, wide > 8 ? wide - 0.75 : Math.max(wide, 1), BAR);
    ctx.globalAlpha = 1;
    const begin = Math.max(left, LEFT);
    const seen = Math.min(left + wide, LEFT + this.width()) - begin;
    if (seen > LABEL) this.label(ctx, work, begin, seen, top, kind?.ink || ink);
  }

  /** @param {CanvasRenderingContext2D} ctx @param {StreamWork} work @param {number} left @param {number} wide @param {number} top @param {string} ink */
  label(ctx, work, left, wide, top, ink) {
    const text = this.data?.words[work[5]] ?? "";
    const short =
      text.length * 6.4 < wide - 8
        ? text
        : (text
            .split("/")[0]
            ?.replace(/\.weight$/, "")
            .split(".")
            .pop() ?? "");
    if (short.length * 6.4 >= wide - 8) return;
    ctx.fillStyle = ink;
    ctx.fillText(short, left + 4, top + BAR / 2 + 0.5);
  }

  /** @param {CanvasRenderingContext2D} ctx @param {string} ink @param {number} h */
  axis(ctx, ink, h) {
    const wide = this.to - this.from;
    const rough = (wide / this.width()) * 90;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough) ?? power;
    ctx.textAlign = "center";
    for (let tick = Math.ceil(this.from / step) * step; tick <= this.to; tick += step) {
      const x = this.x(tick);
      ctx.fillStyle = ink;
      ctx.globalAlpha = 0.12;
      ctx.fillRect(x, AXIS - 4, 1, h - AXIS);
      ctx.globalAlpha = 0.85;
      if (x > LEFT + 12 && x < LEFT + this.width() - 20)
        ctx.fillText(tick === 0 ? "0" : seconds(tick), x, AXIS / 2 - 2);
      ctx.globalAlpha = 1;
    }
    ctx.textAlign = "left";
  }
}

/** @type {Map<string, CanvasPattern>} */
const patterns = new Map();

/** Slanted lines in the page's ink: where nothing is done.
 * @param {CanvasRenderingContext2D} ctx @param {string} ink
 */
function hatched(ctx, ink) {
  const known = patterns.get(ink);
  if (known) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  if (pen) {
    pen.strokeStyle = ink;
    pen.beginPath();
    pen.moveTo(0, 6);
    pen.lineTo(6, 0);
    pen.stroke();
  }
  const made = ctx.createPattern(tile, "repeat");
  if (!made) return ink;
  patterns.set(ink, made);
  return made;
}
