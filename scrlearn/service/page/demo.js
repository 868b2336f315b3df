// The demonstration: SCR and fine-tuning side by side.

import { ask } from "./api.js";
import { curves } from "./chart.js";
import { alertUser, byId, clearAlert, el, percent, setText } from "./dom.js";

const EVERY = 400; // milliseconds
const NAMES = { scr: "SCR", "fine-tune": "Fine-tuning" };
const KINDS = { scr: "scr", "fine-tune": "tune" };
const ABOUT = { scr: "replays 200 images it kept", "fine-tune": "keeps nothing" };
const DIGITS = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];

let timer = 0;
let state = null;
const tiles = {}; // method → {score, row: [{node, fill, text}]}

const busy = () => state?.status === "running" || state?.status === "starting";

export function start() {
  for (const method of Object.keys(NAMES)) byId("demo-rivals").append(rival(method));
  byId("demo-play").addEventListener("click", () => change(busy() ? "DELETE" : "POST"));
  new ResizeObserver(() => draw(state ?? { points: [], total: 1 })).observe(byId("demo-chart"));
}

// The view is seen: a demo may be running already, or have run.
export const open = () => change("GET");
export const close = () => clearTimeout(timer);

async function change(method) {
  clearTimeout(timer);
  clearAlert("demo");
  try {
    state = await ask(method, "v1/demo");
    show();
  } catch (problem) {
    alertUser(problem.message, "demo");
  }
  if (busy() && !byId("view-demo").hidden) timer = setTimeout(() => change("GET"), EVERY);
}

function rival(method) {
  const score = el("span", { class: "score" }, "–");
  const row = DIGITS.map((digit) => {
    const fill = el("span", { class: "fill" });
    const text = el("span", { class: "hidden" }, `${digit}: not met yet`);
    const node = el("li", {}, fill, el("span", { class: "digit", "aria-hidden": "true" }, digit), text);
    return { node, fill, text };
  });
  tiles[method] = { score, row };
  return el(
    "section",
    { class: `rival ${KINDS[method]}`, "aria-label": NAMES[method] },
    el("h2", {}, NAMES[method], el("small", {}, ABOUT[method])),
    el("p", { class: "total" }, score, el("span", { class: "fine" }, "of all digits seen so far")),
    el("ul", { class: "tiles", "aria-label": "What it still knows, digit by digit" }, ...row.map(({ node }) => node)),
  );
}

function show() {
  const { status, total, images } = state;
  setText(byId("demo-play"), busy() ? "Stop" : state.points.length ? "Play it again" : "Play the demo");
  byId("demo-play").classList.toggle("stop", busy());
  byId("demo-progress").hidden = !busy();
  byId("demo-progress").value = total ? images / total : 0;
  setText(byId("demo-status"), sentence());
  if (status === "failed") alertUser(`The demo has failed. ${state.detail ?? ""}`, "demo");
  const coming = state.label !== null;
  byId("demo-feed").hidden = !state.classes.length;
  setText(byId("demo-now"), coming ? `Now coming in: ${state.label}` : `${images.toLocaleString("en")} images came by`);
  const pictures = coming ? state.batch : state.classes.map((known) => known.image);
  byId("demo-batch").replaceChildren(...pictures.map((src) => el("li", {}, el("img", { src, alt: "" }))));
  for (const method of state.methods) showRival(method);
  draw(state);
  showTable();
}

function sentence() {
  const last = state.points.at(-1);
  const outcome = last ? `SCR ${percent(last.accuracy.scr)}, fine-tuning ${percent(last.accuracy["fine-tune"])}` : "";
  return {
    idle: "It takes about half a minute.",
    starting: "Starting…",
    running: "Running",
    finished: `Finished after ${Math.round(state.seconds)} seconds: ${outcome}.`,
    stopped: "Stopped.",
    failed: "",
  }[state.status];
}

function showRival(method) {
  const { score, row } = tiles[method];
  const last = state.points.at(-1);
  setText(score, last ? percent(last.accuracy[method]) : "–");
  const known = state.known[method] ?? [];
  row.forEach(({ node, fill, text }, digit) => {
    const share = known[digit];
    const met = share !== undefined;
    node.className = !met ? "" : share >= 0.5 ? "known" : "lost";
    fill.style.height = met ? `${100 * share}%` : "0";
    node.title = met ? `${percent(share)} of the ${digit}s right` : "";
    setText(text, met ? `${digit}: ${percent(share)}` : `${digit}: not met yet`);
  });
}

function draw({ points, total: known }) {
  const total = known || 1;
  const bands = DIGITS.map((label, place) => ({ label, from: (total * place) / 10, to: (total * (place + 1)) / 10 }));
  const series = Object.keys(NAMES).map((method) => ({
    name: NAMES[method],
    kind: KINDS[method],
    points: points.map((point) => [point.images, point.accuracy[method]]),
  }));
  curves(byId("demo-chart"), { series, bands, total });
}

function showTable() {
  const ends = new Map(); // the last point of each class
  for (const point of state.points) ends.set(point.classes, point);
  byId("demo-details").hidden = !ends.size;
  const row = (point) => {
    const cells = state.methods.map((method) => el("td", {}, percent(point.accuracy[method])));
    return el("tr", {}, el("th", { scope: "row" }, String(point.classes)), ...cells);
  };
  byId("demo-table").replaceChildren(...[...ends.values()].map(row));
  const last = state.points.at(-1);
  const found = last && Object.entries(NAMES).map(([method, name]) => `${name} ${percent(last.accuracy[method])}`);
  setText(byId("demo-summary"), found ? `After ${last.classes} classes: ${found.join(", ")}.` : "Not played yet.");
}
