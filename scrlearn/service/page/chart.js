// Lines as SVG.

import { percent, svg } from "./dom.js";

const BOX = { left: 52, top: 14, bottom: 46 };
const NAMES = 160; // width of the names beside the plot
const NARROW = 560; // below it they are in the plot

// Curves of accuracy over images learned. `series`: [{name, kind, points: [[images, accuracy]]}]; `bands`: what is
// learned when, [{label, from, to}]; `total`: images of the whole stream.
export function curves(node, { series, bands, total }) {
  const { clientWidth: width, clientHeight: height } = node;
  if (!width) return; // not seen
  const narrow = width < NARROW;
  const right = width - (narrow ? 10 : NAMES);
  const bottom = height - BOX.bottom;
  const x = (images) => BOX.left + ((right - BOX.left) * images) / total;
  const y = (share) => bottom - (bottom - BOX.top) * share;
  const parts = [];
  bands.forEach(({ label, from, to }, place) => {
    const band = { x: x(from), y: BOX.top, width: x(to) - x(from), height: bottom - BOX.top };
    if (place % 2 === 0) parts.push(svg("rect", { class: "band", ...band }));
    parts.push(svg("text", { class: "tick", x: (x(from) + x(to)) / 2, y: bottom + 18, "text-anchor": "middle" }, label));
  });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(svg("line", { class: "grid", x1: BOX.left, x2: right, y1: y(share), y2: y(share) }));
    parts.push(svg("text", { class: "tick", x: BOX.left - 8, y: y(share) + 4, "text-anchor": "end" }, percent(share)));
  }
  const middle = (BOX.left + right) / 2;
  parts.push(svg("text", { class: "tick", x: middle, y: height - 6, "text-anchor": "middle" }, "the digit being learned"));
  const ends = [];
  for (const { name, kind, points } of series) {
    if (!points.length) continue;
    const path = points.map(([images, share], place) => `${place ? "L" : "M"}${x(images).toFixed(1)} ${y(share).toFixed(1)}`);
    parts.push(svg("path", { class: `curve ${kind}`, d: path.join("") }));
    const [images, share] = points.at(-1);
    parts.push(svg("circle", { class: `end ${kind}`, cx: x(images), cy: y(share), r: 4.5 }));
    const over = narrow ? { x: right, y: Math.max(BOX.top + 34, y(share) - 12) } : { x: x(images) + 11, y: y(share) + 5 };
    ends.push({ kind, text: `${name} ${percent(share)}`, ...over });
  }
  for (const { kind, text, ...place } of apart(ends)) {
    parts.push(svg("text", { class: `name ${kind}`, ...place, "text-anchor": narrow ? "end" : "start" }, text));
  }
  node.setAttribute("viewBox", `0 0 ${width} ${height}`);
  node.replaceChildren(...parts);
}

// Names that would lie over each other move up and down.
function apart(ends) {
  const [a, b] = ends;
  const gap = 20;
  if (b && Math.abs(a.y - b.y) < gap) {
    const middle = Math.max(BOX.top + gap / 2 + 6, (a.y + b.y) / 2);
    const first = a.y <= b.y ? -1 : 1;
    a.y = middle + (first * gap) / 2;
    b.y = middle - (first * gap) / 2;
  }
  return ends;
}

// A small line of shares from 0 to 1, in a box of 120 × 32.
export function spark(node, shares) {
  if (shares.length < 2) return node.replaceChildren();
  const step = 116 / (shares.length - 1);
  const points = shares.map((share, place) => `${(2 + place * step).toFixed(1)},${(29 - 26 * share).toFixed(1)}`);
  return node.replaceChildren(svg("polyline", { points: points.join(" ") }));
}
