// The page: what belongs together is in the other files; here it is connected.

import { Camera } from "./camera.js";
import { spark } from "./chart.js";
import { ClassList } from "./classes.js";
import * as demo from "./demo.js";
import { alertUser, byId, bytes, clearAlert, count, percent, setText } from "./dom.js";
import { Pad } from "./draw.js";
import { MemoryMap } from "./map.js";
import * as state from "./state.js";
import * as teach from "./teach.js";

const THEMES = ["automatic", "light", "dark"];
const HISTORY = 60;

// ------------------------------------------------------------------ views, tabs, theme

function views() {
  const show = () => {
    const name = location.hash === "#demo" ? "demo" : "teach";
    for (const other of ["teach", "demo"]) {
      byId(`view-${other}`).hidden = other !== name;
      const link = document.querySelector(`nav a[href="#${other}"]`);
      if (other === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${name === "demo" ? "Demo" : "Teach"} · scrlearn`;
    if (name === "demo") demo.open();
    else demo.close();
  };
  addEventListener("hashchange", () => {
    if (["#teach", "#demo", ""].includes(location.hash)) {
      show();
      scrollTo(0, 0);
    }
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address stays that of the view
    byId("main").focus();
  });
  show();
}

function tabs(changed) {
  const all = [...document.querySelectorAll("[role=tab]")];
  const choose = (tab, focus = true) => {
    for (const other of all) {
      other.setAttribute("aria-selected", other === tab);
      other.tabIndex = other === tab ? 0 : -1;
      byId(other.getAttribute("aria-controls")).hidden = other !== tab;
    }
    if (focus) tab.focus();
    byId("pad-help").hidden = tab.id !== "tab-draw";
    changed(tab.id.slice("tab-".length));
  };
  all.forEach((tab, place) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const to = step ? (place + step + all.length) % all.length : { Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(all[to]);
    });
  });
  return (name) => choose(byId(`tab-${name}`), false);
}

function theme(changed) {
  const button = byId("theme");
  const set = (name) => {
    if (name === "automatic") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.setAttribute("aria-label", `Theme: ${name}`);
    button.title = `Theme: ${name}`;
    button.firstElementChild.textContent = { automatic: "◐", light: "○", dark: "●" }[name];
    localStorage.setItem("scrlearn-theme", name);
    changed();
  };
  const stored = localStorage.getItem("scrlearn-theme");
  set(THEMES.includes(stored) ? stored : "automatic");
  button.addEventListener("click", () => {
    const now = THEMES.indexOf(localStorage.getItem("scrlearn-theme"));
    set(THEMES[(now + 1) % THEMES.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

// ------------------------------------------------------------------ images come in

function drawing() {
  let item = null; // what the drawing is among the images of this visit
  const pad = new Pad(byId("pad"), {
    settled: async (blob) => {
      if (item) teach.replace(item, blob);
      else item = await teach.add([{ name: "drawing", blob }]);
    },
    changed: (empty) => {
      byId("pad-ghost").hidden = !empty;
      byId("pad-clear").hidden = empty;
      if (!item && !empty) teach.blank();
      if (empty && item && item.label === undefined) teach.remove(item);
      if (empty) item = null;
    },
  });
  byId("pad-clear").addEventListener("click", () => {
    pad.clear();
    byId("pad").focus();
  });
  return (taught) => taught === item && pad.finish();
}

function files(openTab) {
  const take = (list) => {
    const found = [...list].map((file) => ({ blob: file, name: file.name || "pasted image" }));
    if (found.length) teach.add(found);
    return found.length > 0;
  };
  const input = byId("files");
  byId("choose").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    take(input.files);
    input.value = "";
  });
  document.addEventListener("paste", (event) => {
    if (take(event.clipboardData.files)) event.preventDefault();
  });
  let depth = 0;
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const shown = (on) => (byId("drop").hidden = !on);
  document.addEventListener("dragenter", (event) => hasFiles(event) && shown((depth += 1) > 0));
  document.addEventListener("dragleave", (event) => hasFiles(event) && shown((depth -= 1) > 0));
  document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    shown((depth = 0));
    location.hash = "#teach";
    if (take(event.dataTransfer.files)) openTab("files");
  });
}

// ------------------------------------------------------------------ how it is doing

const history = [];

function showState(now) {
  clearAlert("offline");
  const words = {
    failed: "learning has stopped",
    recovering: `catching up: ${count(now.pending, "image")} to go`,
    ok: now.pending ? `learning: ${count(now.pending, "image")} to go` : "ready",
  };
  byId("status").className = `status ${now.status === "ok" && now.pending ? "busy" : now.status}`;
  setText(byId("status-text"), words[now.status]);
  const troubles = [...now.problems, ...now.notes].join(" ");
  if (troubles !== showState.troubles) alertUser(troubles, "service");
  showState.troubles = troubles;

  showAccuracy(now.recent);
  setText(byId("f-images"), count(now.images, "image"));
  setText(byId("f-steps"), `in ${count(now.steps, "step")}, ${count(now.classes, "class", "classes")}`);
  setText(byId("f-speed"), now.speed ? `${now.speed < 10 ? now.speed.toFixed(1) : Math.round(now.speed)} / s` : "–");
  setText(byId("f-speed-note"), now.speed ? "images learned" : "not measured yet");
  setText(byId("f-memory"), `${now.stored.toLocaleString("en")} of ${now.model.memory_size.toLocaleString("en")}`);
  setText(byId("f-memory-note"), "images kept to replay");
  setText(byId("f-ram"), bytes(now.memory_bytes));
  setText(byId("f-disk"), `of RAM, ${bytes(now.disk_bytes)} on disk`);
  const { method, image_size: size, channels } = now.model;
  setText(byId("foot-model"), `${method} · ${size}×${size} ${channels === 1 ? "grey" : "colour"} · scrlearn ${now.version} ·`);
}

function showAccuracy({ images, right }) {
  const share = images ? right / images : null;
  if (share !== null && (!history.length || history.at(-1).key !== `${right}/${images}`)) {
    history.push({ key: `${right}/${images}`, share });
    history.splice(0, history.length - HISTORY);
  }
  setText(byId("f-accuracy"), share === null ? "–" : percent(share));
  const before = history.at(-2)?.share;
  const moved = before === undefined || share === null ? 0 : share - before;
  const arrow = Math.abs(moved) < 0.005 ? "" : `${moved > 0 ? "▲" : "▼"} from ${percent(before)} · `;
  const counted = images ? `the last ${count(images, "image")}, asked before they were learned` : "";
  setText(byId("f-accuracy-note"), images ? arrow + counted : "Counts from the second image of a class on.");
  spark(byId("spark"), history.map((point) => point.share));
}

// ------------------------------------------------------------------ together

function main() {
  const map = new MemoryMap();
  const classes = new ClassList({ changed: teach.setLabels, highlight: (label) => map.highlight(label) });
  const finished = drawing();
  teach.start({ near: (slots) => map.ring(slots), taught: finished });
  const camera = new Camera((blob) => teach.add([{ blob, name: "camera" }]));
  const openTab = tabs((name) => name !== "camera" && camera.stop());
  files(openTab);
  theme(() => map.draw());
  demo.start();
  views();
  state.on("state", showState);
  state.on("model", async () => {
    try {
      await classes.refresh();
      await map.refresh();
    } catch (problem) {
      alertUser(problem.message, "offline");
    }
  });
  state.on("offline", (problem) => {
    if (byId("status-text").textContent === "not reachable") return; // said already
    byId("status").className = "status failed";
    setText(byId("status-text"), "not reachable");
    alertUser(`${problem.message} This page tries again by itself.`, "offline");
  });
  state.start();
}

main();
