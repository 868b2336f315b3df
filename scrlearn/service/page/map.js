// The map of the memory: each stored image a point, in the colour and shape of its class.

import { ask } from "./api.js";
import { announce, byId, calm, count, percent, setText } from "./dom.js";
import { colours, numberOf, outline, shapeOf } from "./palette.js";

const MOVING = 450; // milliseconds
const PAD = 26;
const NOTE = "Images lie near each other where they look alike to the model.";
const REACH = 18; // pixels around a point in which the pointer finds it

export class MemoryMap {
  constructor() {
    this.canvas = byId("map");
    this.points = []; // {slot, label, x, y} as the service says; px, py: where they are drawn
    this.near = new Set();
    this.only = null;
    this.at = null; // the point under the pointer or the keyboard
    this.images = new Map();
    this.shapes = new Map();
    this.model = -1;
    new ResizeObserver(() => this.#place(false)).observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.#find(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.#show(null));
    this.canvas.addEventListener("blur", () => this.#show(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  async refresh() {
    const drawn = await ask("GET", "v1/map");
    if (drawn.model === this.model && drawn.points.length === this.points.length) return;
    this.model = drawn.model;
    const before = new Map(this.points.map((point) => [point.slot, point]));
    this.points = drawn.points.map((point) => {
      const old = before.get(point.slot);
      return old && old.label === point.label ? { ...point, px: old.px, py: old.py } : point;
    });
    this.images.clear();
    this.at = null;
    this.#show(null);
    byId("map-empty").hidden = this.points.length > 1;
    const classes = new Set(this.points.map((point) => point.label)).size;
    const about = `${count(this.points.length, "image")} of ${count(classes, "class", "classes")}`;
    this.canvas.setAttribute("aria-label", `Map of the memory: ${about}. Arrow keys go from image to image.`);
    const shown = `The plane shows ${percent(drawn.explained)} of what tells them apart.`;
    setText(byId("map-note"), this.points.length > 2 ? `${NOTE} ${shown}` : NOTE);
    this.#place(true);
  }

  // Ring these stored images.
  ring(slots) {
    this.near = new Set(slots);
    this.draw();
  }

  // Let only this class stand out; null: all.
  highlight(label) {
    this.only = label;
    this.draw();
  }

  // Where each point must be, to fill the area with one scale for both directions.
  #place(moving) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !this.points.length) return this.draw();
    const xs = this.points.map((point) => point.x);
    const ys = this.points.map((point) => point.y);
    const [x0, x1] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
    const [y0, y1] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
    const scale = Math.min((width - 2 * PAD) / (x1 - x0 || 1), (height - 2 * PAD) / (y1 - y0 || 1));
    for (const point of this.points) {
      point.toX = width / 2 + (point.x - (x0 + x1) / 2) * scale;
      point.toY = height / 2 - (point.y - (y0 + y1) / 2) * scale;
      point.fromX = point.px ?? point.toX;
      point.fromY = point.py ?? point.toY;
    }
    this.#move(moving && !calm() ? MOVING : 0);
  }

  #move(milliseconds) {
    const begun = performance.now();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const step = (now) => {
      if (turn !== this.turn) return;
      const t = milliseconds ? Math.min(1, Math.max(0, (now - begun) / milliseconds)) : 1;
      const eased = 1 - (1 - t) ** 3;
      for (const point of this.points) {
        point.px = point.fromX + (point.toX - point.fromX) * eased;
        point.py = point.fromY + (point.toY - point.fromY) * eased;
      }
      this.draw();
      if (t < 1) requestAnimationFrame(step);
    };
    step(begun);
  }

  #shape(label) {
    const radius = this.points.length > 600 ? 3 : this.points.length > 150 ? 4 : 5;
    const name = `${shapeOf(label)}/${radius}`;
    if (!this.shapes.has(name)) this.shapes.set(name, new Path2D(outline(shapeOf(label), radius)));
    return this.shapes.get(name);
  }

  draw() {
    const { canvas } = this;
    const ratio = devicePixelRatio;
    const width = Math.round(canvas.clientWidth * ratio);
    const height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const palette = colours();
    const style = getComputedStyle(canvas);
    const [text, paper] = [style.color, style.backgroundColor];
    for (const point of this.points) this.#point(context, point, palette, text);
    this.#names(context, text, paper);
  }

  #point(context, point, palette, text) {
    if (point.px === undefined) return;
    const faint = this.only !== null && point.label !== this.only;
    context.save();
    context.translate(point.px, point.py);
    context.globalAlpha = faint ? 0.12 : 0.82;
    context.fillStyle = palette[numberOf(point.label) % palette.length];
    context.fill(this.#shape(point.label));
    context.globalAlpha = 1;
    if (this.near.has(point.slot) || point === this.at) {
      context.strokeStyle = text;
      context.lineWidth = point === this.at ? 2.5 : 1.5;
      context.beginPath();
      context.arc(0, 0, 9, 0, 2 * Math.PI);
      context.stroke();
    }
    context.restore();
  }

  // The name of each class where the middle of its points is.
  #names(context, text, paper) {
    const groups = new Map();
    for (const point of this.points) {
      if (!groups.has(point.label)) groups.set(point.label, []);
      groups.get(point.label).push(point);
    }
    context.font = `600 13px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineJoin = "round";
    for (const [label, members] of groups) {
      if (this.only !== null && label !== this.only) continue;
      const at = (name, share) => members.map((p) => p[name]).sort((a, b) => a - b)[Math.floor(members.length * share)];
      const name = label.length > 18 ? `${label.slice(0, 17)}…` : label;
      const half = context.measureText(name).width / 2 + 4;
      const x = Math.min(this.canvas.clientWidth - half, Math.max(half, at("px", 0.5)));
      const y = Math.max(12, at("py", 0.1) - 15);
      context.strokeStyle = paper;
      context.lineWidth = 5;
      context.strokeText(name, x, y);
      context.fillStyle = text;
      context.fillText(name, x, y);
    }
  }

  // ---------------------------------------------------------------- looking at a point

  #find(x, y) {
    let best = null;
    let least = REACH * REACH;
    for (const point of this.points) {
      const distance = (point.px - x) ** 2 + (point.py - y) ** 2;
      if (distance < least) [best, least] = [point, distance];
    }
    this.#show(best);
  }

  #key(event) {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") this.#show(null);
    if (!way || !this.points.length) return;
    event.preventDefault();
    const next = this.at ? this.#next(this.at, way) : this.points[0];
    this.#show(next);
    announce(`${next.label}, place ${next.slot + 1} of the memory`);
  }

  // The point to go to: near, and more in this direction than to the side.
  #next(from, [dx, dy]) {
    let best = from;
    let least = Infinity;
    for (const point of this.points) {
      const along = (point.px - from.px) * dx + (point.py - from.py) * dy;
      const aside = Math.abs((point.px - from.px) * dy) + Math.abs((point.py - from.py) * dx);
      if (along > 0.5 && along + 2 * aside < least) [best, least] = [point, along + 2 * aside];
    }
    return best;
  }

  #show(point) {
    if (point === this.at && !(point === null && !byId("tip").hidden)) return;
    this.at = point;
    const tip = byId("tip");
    tip.hidden = !point;
    this.draw();
    if (!point) return;
    setText(byId("tip-text"), point.label);
    tip.style.left = `${Math.min(this.canvas.clientWidth - 90, Math.max(4, point.px - 38))}px`;
    tip.style.top = `${point.py > 130 ? point.py - 118 : point.py + 16}px`;
    this.#picture(point);
  }

  async #picture(point) {
    const image = byId("tip-image");
    image.hidden = true;
    try {
      if (!this.images.has(point.slot)) {
        const { images } = await ask("GET", `v1/memory?offset=${point.slot}&limit=1`);
        if (images[0]?.label === point.label) this.images.set(point.slot, images[0].image);
      }
    } catch {
      return; // the name is shown, the picture is an extra
    }
    if (this.at === point && this.images.has(point.slot)) {
      image.src = this.images.get(point.slot);
      image.hidden = false;
    }
  }
}
