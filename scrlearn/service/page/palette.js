// Colour and shape of each class. Neighbours differ in both, so that nobody needs to tell colours apart.

import { el, svg } from "./dom.js";

const COLOURS = 8; // the classes k0 … k7 of the style sheet
const SHAPES = ["circle", "square", "up", "diamond", "plus", "down", "cross"];
const numbers = new Map();

// The number of a class: kept while it exists, so that its colour does not change.
export function numberOf(label) {
  if (!numbers.has(label)) {
    const used = new Set(numbers.values());
    let number = 0;
    while (used.has(number)) number += 1;
    numbers.set(label, number);
  }
  return numbers.get(label);
}

// Only these classes exist now; the numbers of others are free.
export function keepOnly(labels) {
  const present = new Set(labels);
  for (const label of [...numbers.keys()]) if (!present.has(label)) numbers.delete(label);
  labels.forEach(numberOf);
}

export const colourClass = (label) => `k${numberOf(label) % COLOURS}`;
export const shapeOf = (label) => SHAPES[numberOf(label) % SHAPES.length];

// The colours of this moment's theme, for a canvas.
export function colours() {
  const probe = document.body.appendChild(el("span", { hidden: true }));
  const found = Array.from({ length: COLOURS }, (_, number) => {
    probe.className = `k${number}`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
}

// The outline of a shape around (0, 0), of about the same area for all, as a path of SVG and of a canvas.
export function outline(shape, r) {
  const p = (...points) => `M${points.map(([x, y]) => `${(x * r).toFixed(2)} ${(y * r).toFixed(2)}`).join("L")}Z`;
  const arm = 0.36;
  const plus = [[-arm, -1.15], [arm, -1.15], [arm, -arm], [1.15, -arm], [1.15, arm], [arm, arm], [arm, 1.15],
    [-arm, 1.15], [-arm, arm], [-1.15, arm], [-1.15, -arm], [-arm, -arm]]; // prettier-ignore
  const half = Math.SQRT1_2;
  const turned = plus.map(([x, y]) => [(x - y) * half, (x + y) * half]);
  return {
    circle: `M${-r} 0A${r} ${r} 0 1 1 ${r} 0A${r} ${r} 0 1 1 ${-r} 0Z`,
    square: p([-0.88, -0.88], [0.88, -0.88], [0.88, 0.88], [-0.88, 0.88]),
    up: p([0, -1.25], [1.15, 0.8], [-1.15, 0.8]),
    down: p([0, 1.25], [1.15, -0.8], [-1.15, -0.8]),
    diamond: p([0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]),
    plus: p(...plus),
    cross: p(...turned),
  }[shape];
}

// The sign of a class, to stand beside its name.
export function sign(label) {
  const path = svg("path", { d: outline(shapeOf(label), 5) });
  return svg("svg", { class: `sign ${colourClass(label)}`, viewBox: "-8 -8 16 16", "aria-hidden": "true" }, path);
}
