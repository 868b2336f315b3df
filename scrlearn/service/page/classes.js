// The classes: their counts, some of their images, and forgetting one.

import { ask, newKey } from "./api.js";
import { alertUser, announce, byId, clearAlert, count, el, setText } from "./dom.js";
import { colourClass, keepOnly, sign } from "./palette.js";
import { nudge } from "./state.js";

const FIRST = 10;
const THUMBS = 5;

export class ClassList {
  // `changed(labels)` hears of the classes there are, `highlight(label)` of the one to show on the map.
  constructor({ changed, highlight }) {
    this.changed = changed;
    this.onHighlight = highlight;
    this.shown = FIRST;
    this.rows = new Map(); // label → {node, parts, stored, learned}
    this.selected = null;
    this.forgetting = new Set();
    byId("classes-more").addEventListener("click", () => {
      this.shown += 20;
      this.#show(this.classes);
    });
  }

  async refresh() {
    const { classes } = await ask("GET", "v1/classes");
    this.classes = classes;
    keepOnly(classes.map((known) => known.label));
    if (!classes.some((known) => known.label === this.selected)) this.#select(null);
    this.#show(classes);
    this.changed(classes.map((known) => known.label));
  }

  #show(classes) {
    byId("classes-empty").hidden = classes.length > 0;
    byId("classes-note").hidden = classes.length === 0;
    const more = byId("classes-more");
    more.hidden = classes.length <= this.shown;
    setText(more, `Show more (${classes.length - this.shown} left)`);
    const shown = classes.slice(0, this.shown);
    const labels = new Set(shown.map((known) => known.label));
    for (const [label, row] of this.rows) {
      if (!labels.has(label)) {
        row.node.remove();
        this.rows.delete(label);
      }
    }
    shown.forEach((known, place) => {
      const row = this.rows.get(known.label) ?? this.#make(known.label);
      if (byId("classes").children[place] !== row.node) byId("classes").insertBefore(row.node, byId("classes").children[place] ?? null);
      setText(row.counts, `${known.learned.toLocaleString("en")} learned · ${known.stored.toLocaleString("en")} kept`);
      if (row.stored !== known.stored || row.learned !== known.learned) this.#thumbs(known, row);
    });
  }

  #make(label) {
    const name = el(
      "button",
      { type: "button", class: "class-name", "aria-pressed": "false", onclick: () => this.#select(label) },
      sign(label),
      el("span", {}, label),
    );
    const counts = el("span", { class: "fine" });
    const thumbs = el("span", { class: "thumbs", "aria-hidden": "true" });
    const forget = el(
      "button",
      { type: "button", class: "quiet forget", "aria-label": `Forget ${label}`, onclick: () => this.#askForget(label) },
      "Forget",
    );
    const about = el("div", { class: "about" }, name, counts);
    const node = el("li", { class: colourClass(label) }, about, thumbs, forget);
    const row = { node, name, counts, thumbs };
    this.rows.set(label, row);
    return row;
  }

  async #thumbs(known, row) {
    Object.assign(row, { stored: known.stored, learned: known.learned });
    try {
      const { images } = await ask("GET", `v1/memory?limit=${THUMBS}&label=${encodeURIComponent(known.label)}`);
      row.thumbs.replaceChildren(...images.map(({ image }) => el("img", { src: image, alt: "" })));
    } catch {
      row.stored = undefined; // another time
    }
  }

  #select(label) {
    this.selected = label === this.selected ? null : label;
    for (const [name, row] of this.rows) row.name.setAttribute("aria-pressed", name === this.selected);
    this.onHighlight(this.selected);
  }

  #askForget(label) {
    const dialog = byId("forget-dialog");
    const known = this.classes.find((other) => other.label === label);
    setText(byId("forget-title"), `Forget “${label}”?`);
    setText(
      byId("forget-text"),
      `${count(known?.stored ?? 0, "image")} in memory and everything of it on disk are removed. This cannot be undone.`,
    );
    byId("forget-no").onclick = () => dialog.close();
    byId("forget-yes").onclick = () => {
      dialog.close();
      this.#forget(label);
    };
    dialog.showModal();
  }

  async #forget(label) {
    clearAlert("forget");
    this.rows.get(label)?.node.classList.add("going");
    try {
      await ask("DELETE", `v1/classes/${encodeURIComponent(label)}`, { key: newKey() });
      announce(`“${label}” is forgotten.`);
      byId("classes-title").focus();
    } catch (problem) {
      this.rows.get(label)?.node.classList.remove("going");
      alertUser(`“${label}” was not forgotten. ${problem.message}`, "forget");
    }
    nudge();
  }
}
