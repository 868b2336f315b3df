// Images to the service: in parts, made smaller where they are huge, and with errors that name the file.

import { Problem, ask, newKey } from "./api.js";

const TOGETHER = 16;
const LARGE = 1 << 20;
const SIDE = 640; // a huge photograph is sent with this shorter side

// A photograph of many megabytes as a small one; what the browser cannot read goes as it is, for the service to judge.
export async function shrink(blob) {
  if (blob.size <= LARGE) return blob;
  try {
    const image = await createImageBitmap(blob);
    const scale = Math.min(1, SIDE / Math.min(image.width, image.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(image.width * scale));
    canvas.height = Math.max(1, Math.round(image.height * scale));
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    image.close();
    return await new Promise((resolve) => canvas.toBlob((small) => resolve(small ?? blob), "image/png"));
  } catch {
    return blob;
  }
}

function form(items, label) {
  const data = new FormData();
  for (const item of items) data.append("images", item.blob, "image");
  if (label !== undefined) data.append("labels", label);
  return data;
}

// "Image 3 is empty." as "cat.png is empty."
export const named = (problem, name) => problem.message.replace(/^Image \d+/, name);

// Ask about items. `answered(item, prediction)` and `failed(item, text)` are called for each.
export async function predict(items, answered, failed) {
  let rest = [...items];
  while (rest.length) {
    const part = rest.slice(0, TOGETHER);
    try {
      const { predictions } = await ask("POST", "v1/nearest?k=6", { form: form(part) });
      part.forEach((item, place) => answered(item, predictions[place]));
      rest = rest.slice(part.length);
    } catch (problem) {
      const bad = problem instanceof Problem ? part[problem.document.image] : undefined;
      if (!bad) throw problem;
      failed(bad, named(problem, bad.name)); // the others are asked about without it
      rest = rest.filter((item) => item !== bad);
    }
  }
}

// Keys of requests whose answer has not come, by their first image: sent again, they are done once.
const unanswered = new WeakMap();

function keyFor(part, label) {
  const before = unanswered.get(part[0].blob);
  const same = before?.label === label && before.blobs.length === part.length;
  if (same && part.every((item, place) => item.blob === before.blobs[place])) return before.key;
  const key = newKey();
  unanswered.set(part[0].blob, { label, blobs: part.map((item) => item.blob), key });
  return key;
}

// Teach items one label; `accepted(part)` hears of those that are on disk. Gives whether the model knows them already.
export async function learn(items, label, accepted) {
  let learned = true;
  for (let first = 0; first < items.length; first += TOGETHER) {
    const part = items.slice(first, first + TOGETHER);
    const wait = first + TOGETHER >= items.length ? 30 : 0;
    const answer = await ask("POST", `v1/learn?wait=${wait}`, { form: form(part, label), key: keyFor(part, label) });
    unanswered.delete(part[0].blob);
    accepted(part);
    learned = answer.learned;
  }
  return learned;
}
