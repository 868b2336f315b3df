// Small helpers for the page's elements.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// An HTML element: el("p", { class: "fine", onclick: f }, "text", otherElement)
export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

// An SVG element.
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Put text into an element, only where it differs: a screen reader does not read it again then.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const percent = (share) => `${Math.round(100 * share)}\u00a0%`;

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${number < 10 && unit > 0 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

// Say something to screen readers.
export function announce(text) {
  byId("announce").textContent = text;
}

// Show an error until it is closed, or until the same thing succeeds.
export function alertUser(text, kind = "error") {
  const alerts = byId("alerts");
  const before = alerts.querySelector(`[data-kind="${kind}"]`);
  if (before?.firstChild.textContent === text) return;
  before?.remove();
  if (!text) return;
  const close = el("button", { type: "button", class: "quiet icon", "aria-label": "Close this message" }, "✕");
  const box = el("div", { class: "alert", "data-kind": kind }, el("p", {}, text), close);
  close.addEventListener("click", () => box.remove());
  alerts.append(box);
}

export const clearAlert = (kind = "error") => alertUser("", kind);

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
