// Images of this visit: ask about them, see the answer, teach what they are.

import { alertUser, announce, byId, clearAlert, el, percent, setText } from "./dom.js";
import { colourClass, sign } from "./palette.js";
import { nudge } from "./state.js";
import { learn, predict, shrink } from "./upload.js";

const MOST_ITEMS = 120;
const MOST_CHIPS = 12;

let items = []; // newest first
let current = null;
let labels = [];
let teaching = false;
let shownNear = () => {};
let wasTaught = () => {};
let note = ""; // what became of the image shown

// `near(slots)` hears which stored images are nearest to the one shown, `taught(item)` of each that was taught.
export function start({ near, taught }) {
  shownNear = near;
  wasTaught = taught;
  byId("teach-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const label = byId("label").value.trim();
    if (label) teach(label);
    else byId("label").focus();
  });
  showCurrent();
}

// Look at new images; gives the item of the first, before there is an answer.
export async function add(blobs) {
  const added = [];
  for (const { blob, name } of blobs) {
    const small = await shrink(blob);
    added.push({ blob: small, name, url: URL.createObjectURL(small), state: "asking" });
  }
  items = [...added, ...items];
  for (const old of items.splice(MOST_ITEMS)) URL.revokeObjectURL(old.url);
  select(added[0]);
  askAbout(added);
  return added[0];
}

// The drawing has gone on: look at it anew, as the same item.
export function replace(item, blob) {
  URL.revokeObjectURL(item.url);
  Object.assign(item, { blob, url: URL.createObjectURL(blob), state: "asking" });
  select(item);
  askAbout([item]);
}

export function remove(item) {
  items = items.filter((other) => other !== item);
  URL.revokeObjectURL(item.url);
  if (current === item) select(null);
  else showTray();
}

// Show no image: a new one is being made.
export const blank = () => current && select(null);

export function setLabels(known) {
  labels = known;
  byId("known-labels").replaceChildren(...known.map((label) => el("option", { value: label })));
  if (current) showTeaching();
  else showVerdict();
}

async function askAbout(asked) {
  clearAlert("ask");
  const blobs = new Map(asked.map((item) => [item, item.blob]));
  const broken = [];
  try {
    await predict(
      asked,
      (item, prediction) => {
        if (blobs.get(item) !== item.blob) return; // drawn on since
        Object.assign(item, { prediction, state: "answered" });
        if (item.label === undefined) item.before = prediction.label;
        if (item === current) showCurrent();
      },
      (item, text) => {
        Object.assign(item, { state: "broken", error: text });
        broken.push(text);
      },
    );
  } catch (problem) {
    for (const item of asked) if (item.state === "asking") item.state = "waiting";
    alertUser(problem.message, "ask");
  }
  if (broken.length) alertUser(broken.slice(0, 5).join(" ") + (broken.length > 5 ? " …" : ""), "ask");
  for (const item of asked) if (item.state === "broken") remove(item);
  if (!current && items.length) select(items[0]);
  showTray();
  if (asked.includes(current)) announce(sentence(current));
}

function sentence(item) {
  const { prediction } = item;
  if (!prediction) return "";
  if (!prediction.classes.length) return "It knows no classes yet.";
  const best = `${prediction.classes[0].label}, ${percent(prediction.confidence)}`;
  return prediction.unknown ? `Unknown. Most like ${best}.` : `It says ${best}.`;
}

// ------------------------------------------------------------------ teaching

async function teach(label) {
  const taught = byId("all").checked && !byId("all-box").hidden ? untaught() : [current];
  if (teaching || !taught[0]) return;
  teaching = true;
  const isNew = !labels.includes(label);
  clearAlert("teach");
  showTeaching();
  setText(byId("taught"), "Learning…");
  let done = 0;
  try {
    const learned = await learn(taught, label, (part) => {
      for (const item of part) {
        Object.assign(item, { label, verdict: isNew ? "new" : item.before === label ? "right" : "wrong" });
        wasTaught(item);
      }
      done += part.length;
    });
    byId("label").value = "";
    nudge();
    const what = taught.length === 1 ? "" : `${taught.length} images `;
    note = learned ? `Learned ${what}as “${label}”.` : `Accepted ${what}as “${label}”; learned soon.`;
    await askAbout(taught.includes(current) && current ? [current] : []);
    announce(`${note} ${sentence(current)}`);
  } catch (problem) {
    note = "";
    const none = problem.code === "offline" ? "It may not have been taught." : "Nothing was taught.";
    const what = done ? `${done} of ${taught.length} images were taught.` : none;
    alertUser(`${what} ${problem.message}`, "teach");
  }
  teaching = false;
  showCurrent();
  showTray();
}

// Whether it is an image at all is known when the service has looked at it.
const canBeShown = (item) => item?.prediction || item?.state === "waiting";

const untaught = () => items.filter((item) => item.label === undefined && item.state !== "broken");

// ------------------------------------------------------------------ what is seen

function select(item) {
  if (item !== current) note = item?.label === undefined ? "" : `Taught as “${item.label}”.`;
  current = item;
  showCurrent();
  showTray();
}

function showCurrent() {
  const prediction = current?.prediction;
  const image = byId("shown");
  image.hidden = !canBeShown(current);
  if (!image.hidden) image.src = current.url;
  showVerdict(prediction);
  showBars(prediction?.classes ?? []);
  showNear(prediction?.neighbours ?? []);
  showTeaching();
}

function showVerdict(prediction) {
  const word = byId("verdict");
  word.className = "word";
  byId("hint").hidden = Boolean(current) || labels.length > 0;
  if (!current) {
    setText(word, labels.length ? "What is it?" : "It knows nothing yet");
    const first = labels.length ? "" : " Teach it two things, and it begins to tell them apart.";
    setText(byId("why"), `Draw something, drop an image, or paste one. It answers at once.${first}`);
    word.classList.add("pale");
  } else if (!prediction) {
    setText(word, current.state === "waiting" ? "No answer" : "Looking…");
    setText(byId("why"), "");
    word.classList.add("pale");
  } else if (!prediction.classes.length) {
    setText(word, "Unknown");
    setText(byId("why"), "It knows no classes yet. Tell it what this is.");
  } else {
    const [best] = prediction.classes;
    setText(word, prediction.unknown ? "Unknown" : prediction.label);
    if (!prediction.unknown) word.classList.add(colourClass(prediction.label));
    const far = best.nearest === null ? "" : ` Nearest image ${best.nearest.toPrecision(2)} away`;
    const limit = best.threshold === null ? "." : `, known up to ${best.threshold.toPrecision(2)}.`;
    const unknown = `Most like “${best.label}”, but too far from it.`;
    const sure = `Confidence ${percent(prediction.confidence)}.`;
    setText(byId("why"), (prediction.unknown ? unknown : sure) + (far && far + limit));
  }
}

function showBars(classes) {
  const list = byId("bars");
  list.hidden = classes.length < 2;
  list.replaceChildren(
    ...classes.map((near) => {
      const bar = el("span", { class: `bar ${colourClass(near.label)}`, "aria-hidden": "true" }, el("span"));
      bar.firstChild.style.width = `${100 * near.confidence}%`;
      const distance = near.distance === null ? "" : near.distance.toFixed(2);
      return el(
        "li",
        {},
        el("span", { class: "what" }, sign(near.label), el("span", {}, near.label)),
        bar,
        el("span", { class: "num" }, percent(near.confidence)),
        el("span", { class: "num far", title: "Distance to the class" }, distance),
      );
    }),
  );
}

function showNear(neighbours) {
  byId("near-box").hidden = !neighbours.length;
  byId("near").replaceChildren(
    ...neighbours.map((n) =>
      el(
        "li",
        {},
        el("img", { src: n.image, alt: "" }),
        el("span", { class: "what" }, sign(n.label), el("span", {}, n.label)),
        el("span", { class: "num far" }, n.distance.toFixed(2)),
      ),
    ),
  );
  shownNear(neighbours.map((n) => n.slot));
}

function showTeaching() {
  byId("teach-box").hidden = !current;
  if (!current) return;
  const guess = current.prediction?.unknown ? null : current.prediction?.label;
  const likely = (current.prediction?.classes ?? []).map((near) => near.label);
  // all classes in their own order while there are few, so that each button stays in its place
  const offered = labels.length <= MOST_CHIPS ? labels : [...new Set([...likely, ...labels])].slice(0, MOST_CHIPS);
  const focused = document.activeElement?.closest("#chips button")?.dataset.label;
  const chips = offered.map((label) =>
    el(
      "button",
      {
        type: "button",
        class: `chip ${colourClass(label)}`,
        "data-label": label,
        "aria-label": label === guess ? `Yes, it is ${label}` : `It is ${label}`,
        onclick: () => teach(label),
      },
      sign(label),
      el("span", {}, label),
      label === guess ? el("span", { class: "yes", "aria-hidden": "true" }, "✓") : null,
    ),
  );
  byId("chips").replaceChildren(...chips);
  chips.find((chip) => chip.dataset.label === focused)?.focus();
  for (const button of byId("teach-box").querySelectorAll("button")) button.setAttribute("aria-disabled", teaching);
  const others = untaught();
  byId("all-box").hidden = others.length < 2;
  setText(byId("all-text"), `Teach all ${others.length} images that have no label yet`);
  if (others.length < 2) byId("all").checked = false;
  if (!teaching) setText(byId("taught"), note);
}

function showTray() {
  byId("tray-box").hidden = !items.length;
  const right = items.filter((item) => item.verdict === "right").length;
  const taught = right + items.filter((item) => item.verdict === "wrong").length;
  setText(byId("tray-title"), taught ? `This visit: ${right} of ${taught} right before teaching` : "This visit");
  const focused = document.activeElement?.closest("#tray button") ? current : null;
  const buttons = items.map((item, place) => {
    const verdict = item.verdict ?? "";
    const said = item.label ?? item.prediction?.label ?? "";
    const about = [`Image ${items.length - place}`, item.name, said || (item.prediction ? "unknown" : ""), verdict];
    const button = el(
      "button",
      {
        type: "button",
        class: `thumb ${verdict}`,
        "aria-label": about.filter(Boolean).join(", "),
        "aria-current": item === current ? "true" : null,
        onclick: () => select(item),
      },
      canBeShown(item) ? el("img", { src: item.url, alt: "" }) : null,
      el("span", { class: "mark", "aria-hidden": "true" }, { right: "✓", wrong: "✗", new: "+" }[verdict] ?? ""),
    );
    if (item === focused) queueMicrotask(() => button.focus());
    return el("li", {}, button);
  });
  byId("tray").replaceChildren(...buttons);
}
