// The drawing area, by pointer, touch or keyboard.

const SENT = 128; // side of the picture that is sent
const PEN = 0.075; // width of the pen, as a share of the picture
const MARGIN = 0.16;
const SMALLEST = 0.22; // a dot is not blown up beyond this share of the area
const SETTLED = 450; // milliseconds without a stroke after which a drawing is looked at
const STEP = 1 / 20;
const PAPER = "#ffffff";
const INK = "#15171a";

// A drawing area on a canvas. `settled(blob)` is called when a drawing pauses, `changed(empty)` at once.
export class Pad {
  constructor(canvas, { settled, changed }) {
    this.canvas = canvas;
    this.settled = settled;
    this.changed = changed;
    this.strokes = [];
    this.pen = { x: 0.5, y: 0.5, down: false, shown: false };
    this.done = false;
    this.timer = 0;
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.#end());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#lift(false));
    new ResizeObserver(() => this.#paint()).observe(canvas);
  }

  // The drawing was taught: the next stroke begins a new one.
  finish() {
    this.done = true;
  }

  clear() {
    this.strokes = [];
    this.done = false;
    this.pen.down = false;
    clearTimeout(this.timer);
    this.#paint();
    this.changed(true);
  }

  get empty() {
    return this.strokes.length === 0;
  }

  #place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #stroke(point) {
    if (this.done) this.clear();
    clearTimeout(this.timer);
    this.strokes.push([point]);
    this.changed(false);
    this.#paint();
  }

  #begin(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.pen.shown = false;
    this.pen.down = false;
    this.drawing = true;
    this.#stroke(this.#place(event));
  }

  #move(event) {
    if (!this.drawing) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const part of events.length ? events : [event]) this.strokes.at(-1).push(this.#place(part));
    this.#paint();
  }

  #end() {
    if (!this.drawing) return;
    this.drawing = false;
    this.#settle();
  }

  #settle() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => !this.empty && this.picture().then(this.settled), SETTLED);
  }

  #key(event) {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const { pen } = this;
    if (way) {
      const step = event.shiftKey ? STEP / 4 : STEP;
      const inside = (value) => Math.min(1, Math.max(0, value));
      pen.x = inside(pen.x + way[0] * step);
      pen.y = inside(pen.y + way[1] * step);
      pen.shown = true;
      if (pen.down) this.strokes.at(-1).push([pen.x, pen.y]);
    } else if (event.key === " " || event.key === "Enter") {
      pen.shown = true;
      if (pen.down) this.#lift(true);
      else {
        this.#stroke([pen.x, pen.y]);
        pen.down = true;
      }
    } else if (event.key === "Delete" || event.key === "Backspace" || event.key === "Escape") {
      this.clear();
    } else return;
    event.preventDefault();
    this.#paint();
  }

  #lift(stays) {
    if (this.pen.down) this.#settle();
    this.pen.down = false;
    this.pen.shown = stays;
    this.#paint();
  }

  #paint() {
    const { canvas, pen } = this;
    const side = Math.round(canvas.clientWidth * devicePixelRatio);
    if (!side) return;
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const context = canvas.getContext("2d");
    paper(context, side);
    lines(context, this.strokes, (x) => x * side, (y) => y * side, 0.055 * side);
    if (pen.shown) {
      context.strokeStyle = pen.down ? "#0b5cad" : "#8a8a8a";
      context.lineWidth = 2 * devicePixelRatio;
      context.beginPath();
      context.arc(pen.x * side, pen.y * side, 0.04 * side, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  // What is sent: the drawing, moved to the middle and brought to one size, as a PNG.
  picture() {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = SENT;
    const context = canvas.getContext("2d");
    paper(context, SENT);
    const { scale, left, top } = frame(this.strokes);
    lines(context, this.strokes, (x) => (x - left) * scale * SENT, (y) => (y - top) * scale * SENT, PEN * SENT);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }
}

// The square around all strokes, with a margin: where it begins, and by how much it is enlarged.
export function frame(strokes) {
  const xs = strokes.flat().map(([x]) => x);
  const ys = strokes.flat().map(([, y]) => y);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const side = Math.max(x1 - x0, y1 - y0, SMALLEST) / (1 - 2 * MARGIN);
  return { scale: 1 / side, left: (x0 + x1 - side) / 2, top: (y0 + y1 - side) / 2 };
}

function paper(context, side) {
  context.fillStyle = PAPER;
  context.fillRect(0, 0, side, side);
}

function lines(context, strokes, x, y, width) {
  context.strokeStyle = INK;
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = width;
  for (const stroke of strokes) {
    context.beginPath();
    context.moveTo(x(stroke[0][0]), y(stroke[0][1]));
    for (const point of stroke) context.lineTo(x(point[0]), y(point[1]));
    context.stroke();
  }
}
