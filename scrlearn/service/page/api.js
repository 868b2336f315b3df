// Requests to the service: the token, errors in words, and another try where that helps.

import { byId } from "./dom.js";

const TOKEN = "scrlearn-token";
const TRIES = 4;
const LONGEST_PAUSE = 5;

let token = sessionStorage.getItem(TOKEN);
let asking = null;

// What went wrong, in words for the person; `code` is the service's name for it, `document` all it said.
export class Problem extends Error {
  constructor(code, message, document = {}) {
    super(message);
    this.code = code;
    this.document = document;
  }
}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// A name for a request, so that it is done once even when it is sent twice.
export function newKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Ask the service; gives what it answers, or throws a Problem.
export async function ask(method, path, { form, key } = {}) {
  for (let attempt = 1; ; attempt += 1) {
    const response = await send(method, path, form, key);
    if (response.ok) return response.json();
    const problem = await read(response);
    if (response.status === 401) {
      await askForToken(token !== null);
    } else if ([429, 503].includes(response.status) && response.headers.has("retry-after") && attempt < TRIES) {
      await pause(Math.min(LONGEST_PAUSE, Number(response.headers.get("retry-after")) || 1));
    } else {
      throw problem;
    }
  }
}

async function send(method, path, form, key) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (key) headers["Idempotency-Key"] = key;
  try {
    return await fetch(path, { method, headers, body: form });
  } catch {
    throw new Problem("offline", "The service does not answer. Is it still running?");
  }
}

async function read(response) {
  try {
    const document = await response.json();
    return new Problem(document.code ?? "error", document.detail ?? response.statusText, document);
  } catch {
    return new Problem("error", `The service answered with ${response.status} ${response.statusText}.`);
  }
}

// One dialog for however many requests were refused.
function askForToken(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("token-dialog");
    const form = byId("token-form");
    byId("token-error").textContent = wasWrong ? "That token was not accepted. Try again." : "";
    byId("token").value = "";
    const stay = (event) => event.preventDefault(); // nothing can be done without it
    const done = (event) => {
      event.preventDefault();
      token = byId("token").value.trim();
      sessionStorage.setItem(TOKEN, token);
      form.removeEventListener("submit", done);
      dialog.removeEventListener("cancel", stay);
      dialog.close();
      asking = null;
      resolve();
    };
    form.addEventListener("submit", done);
    dialog.addEventListener("cancel", stay);
    if (!dialog.open) dialog.showModal();
  });
  return asking;
}
