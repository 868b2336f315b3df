// What the service says of itself, asked for again and again; listeners hear of what changed.

import { ask } from "./api.js";

const LIVELY = 600; // milliseconds between two questions while something happens
const QUIET = 2500;
const LIVELY_FOR = 4000;

const listeners = { state: [], model: [], offline: [] };
let timer = 0;
let livelyUntil = 0;
let model = null;
let running = false;
let again = false;

// "state": every answer; "model": the model that answers is another one; "offline": no answer.
export const on = (name, listener) => listeners[name].push(listener);
const tell = (name, value) => listeners[name].forEach((listener) => listener(value));

async function look() {
  if (running) {
    again = true;
    return;
  }
  running = true;
  let busy = false;
  try {
    const state = await ask("GET", "v1/state");
    busy = state.pending > 0 || state.status === "recovering";
    tell("state", state);
    if (state.published !== model) {
      model = state.published;
      tell("model", state);
    }
  } catch (problem) {
    tell("offline", problem);
  }
  running = false;
  clearTimeout(timer);
  const soon = again ? 0 : busy || performance.now() < livelyUntil ? LIVELY : QUIET;
  again = false;
  if (!document.hidden) timer = setTimeout(look, soon);
}

// Something was done: look now, and more often for a while.
export function nudge() {
  livelyUntil = performance.now() + LIVELY_FOR;
  clearTimeout(timer);
  look();
}

export function start() {
  document.addEventListener("visibilitychange", () => !document.hidden && nudge());
  look();
}
