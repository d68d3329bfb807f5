// The page: a path of steps and a menu of tools, one model and one image for all of them, one state
// in the hash. Every change that rests for a moment is an entry of the browser's history, so that
// undo and redo are back and forward.

import * as api from "./api.js";
import { Chooser, h } from "./parts.js";
import { declare, decode, encode } from "./state.js";

const find = (query) => document.querySelector(query);
const [path, menu, main, tray] = [".path", "#tools", "main", "#tray"].map(find);
const [question, notice, models, live] = ["#question", "#notice", "#model", "#live"].map(find);
const REST = 400; // milliseconds without a change that end an entry of the history

let hello;
let state;
let chooser;
let written = "";
let place = 0; // of the shown entry in the history of this tab
const opened = new Map(); // panels that were built: {root, update}
const modules = new Map();
const lastOf = new Map(); // the model that was used last, by kind

const model = () => hello.models.find(({ key }) => key === state.model);
const able = (panel, served) => panel.kinds.length === 0 || (panel.kinds.includes(served.kind) && !(panel.blocks && served.layers === undefined));

// The model that a panel opens with: this one; or, for another kind, the last or first that fits. A
// panel that the model at hand is the kind for, but cannot do, is not there.
function modelFor(panel) {
  const now = model();
  if (!now || able(panel, now)) return now;
  if (panel.kinds.includes(now.kind)) return undefined;
  const fits = hello.models.filter((served) => able(panel, served));
  return fits.find(({ key }) => key === lastOf.get(panel.kinds[0])) ?? fits[0];
}

const top = () => +(sessionStorage.getItem("seecause-top") ?? 0);

function marks() {
  find("#undo").disabled = place <= 0;
  find("#redo").disabled = place >= top();
}

function write({ replace = false } = {}) {
  clearTimeout(scheduled);
  const hash = encode(state);
  if (hash === written) return;
  const first = written === "";
  written = hash;
  if (replace || first) history.replaceState({ place }, "", hash);
  else {
    place += 1;
    sessionStorage.setItem("seecause-top", place);
    history.pushState({ place }, "", hash);
  }
  marks();
}

let scheduled = 0;
function soon() { // a stroke or a drag is one entry
  clearTimeout(scheduled);
  scheduled = setTimeout(write, REST);
}

function toolsOf(name) {
  return {
    get hello() { return hello; },
    set(changes) {
      Object.assign(state[name], changes);
      soon();
      opened.get(name).update(state);
    },
    state: () => state,
    model,
    choose,
    go,
    take: (file) => take(file),
    refresh,
    result: api.result,
    ask: (action, request, options = {}) => api.ask(options.panel ?? name, action, request, options),
    say(words) { live.textContent = words; },
  };
}

// Another image: what was brushed, cut or pointed at on the old one goes with it.
function choose(image) {
  if (image === state.image) return;
  state.image = image;
  for (const [name, { panel }] of modules) {
    for (const field of panel.perImage ?? []) state[name][field] = panel.defaults[field];
  }
  soon();
  show();
}

// Models and datasets of this session may have changed.
async function refresh() {
  const now = await api.hello();
  Object.assign(hello, { models: now.models, data: now.data });
}

function steps() {
  const button = ({ name, title }) => h("button", { type: "button", "data-panel": name, "aria-current": name === state.panel ? "page" : null, onclick: () => go(name) }, title);
  const shown = hello.panels.filter((panel) => modelFor(panel) || panel.kinds.length === 0);
  path.replaceChildren(...shown.filter((panel) => panel.path).flatMap((panel, index) => [index ? h("span", { "aria-hidden": "true" }, "›") : null, button(panel)]).filter(Boolean));
  const others = shown.filter((panel) => !panel.path);
  menu.hidden = others.length === 0;
  menu.querySelector(".menu-list").replaceChildren(...others.map(button));
  const tool = others.find(({ name }) => name === state.panel);
  menu.querySelector("summary").replaceChildren(h("span", {}, tool ? "Tools: " : "Tools"), tool?.title ?? "");
  menu.classList.toggle("current", Boolean(tool));
}

function show() {
  let panel = hello.panels.find((known) => known.name === state.panel);
  if (!model()) {
    if (state.model) say(`This link is about the model ${state.model}, which is not served here.`);
    state.model = hello.models[0]?.key ?? "";
  }
  if (panel.kinds.length && !modelFor(panel)) {
    say(`${panel.title} cannot be used with ${state.model || "no model"}.`);
    panel = hello.panels.find((known) => modelFor(known));
    state.panel = panel.name;
  }
  if (panel.kinds.length) state.model = modelFor(panel).key;
  if (model()) lastOf.set(model().kind, state.model);
  const fits = hello.models.filter((served) => able(panel, served));
  models.replaceChildren(...fits.map(({ key }) => h("option", { value: key }, key)));
  models.value = state.model;
  models.closest("label").hidden = panel.kinds.length === 0;
  question.textContent = `${panel.title}: ${panel.question}`;
  document.title = `seecause: ${panel.title}`;
  tray.hidden = modules.get(panel.name).panel.noImage === true;
  chooser.choose(state.image);
  steps();
  for (const [name, { root }] of opened) root.hidden = name !== panel.name;
  if (!opened.has(panel.name)) {
    const root = h("div", { class: "panel", id: `panel-${panel.name}` });
    main.append(root);
    opened.set(panel.name, { root, ...modules.get(panel.name).panel.mount(root, toolsOf(panel.name)) });
  }
  opened.get(panel.name).update(state);
  write({ replace: written === "" });
  marks();
}

function say(words) {
  notice.textContent = words;
  notice.hidden = !words;
}

function go(panel, changes = {}) {
  write();
  Object.assign(state, changes, { panel });
  menu.open = false;
  say("");
  show();
  window.scrollTo(0, 0);
}

async function take(file) {
  if (!file) return;
  say("");
  try {
    if (/\.zip$/i.test(file.name)) {
      const data = await api.uploadData(file);
      await refresh();
      state.test.data = data.name;
      go("test");
      live.textContent = `${data.name}: ${data.images} images`;
    } else {
      await chooser.take(file);
      if (tray.hidden) go("explain");
    }
  } catch (failure) {
    say(failure.message);
  }
}

function restore() {
  if (location.hash === written) return;
  place = history.state?.place ?? place;
  state = decode(location.hash, hello.panels[0].name, hello.samples[0]?.id ?? "");
  written = location.hash;
  say("");
  show();
  marks();
}

function build() {
  chooser = new Chooser(hello, { label: "Image", onchoose: choose });
  tray.append(chooser.element);
  models.addEventListener("change", () => {
    state.model = models.value;
    say("");
    show();
  });
  find("#undo").addEventListener("click", () => { write(); history.back(); });
  find("#redo").addEventListener("click", () => history.forward());
  for (const name of ["hashchange", "popstate"]) window.addEventListener(name, restore);
  window.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z" || event.target.matches("input:not([type=range]), textarea")) return;
    event.preventDefault();
    find(event.shiftKey ? "#redo" : "#undo").click();
  });
  document.addEventListener("click", (event) => { if (!menu.contains(event.target)) menu.open = false; });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  // a file may be dropped or pasted anywhere
  window.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("over");
  });
  for (const name of ["dragleave", "drop"]) window.addEventListener(name, (event) => { if (name === "drop" || !event.relatedTarget) document.body.classList.remove("over"); });
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  window.addEventListener("paste", (event) => take(event.clipboardData?.files[0]));
}

async function start() {
  hello = await api.hello();
  const failed = [];
  await Promise.all(hello.panels.map(async ({ name, title }) => {
    const loaded = await import(`./panel-${name}.js`).catch(() => null);
    if (loaded) modules.set(name, loaded);
    else failed.push(title);
  }));
  hello.panels = hello.panels.filter(({ name }) => modules.has(name));
  if (failed.length) say(`These panels could not be loaded: ${failed.join(", ")}.`);
  for (const { name } of hello.panels) declare(name, modules.get(name).panel.defaults);
  place = history.state?.place ?? 0;
  if (!history.state) sessionStorage.removeItem("seecause-top");
  state = decode(location.hash, hello.panels[0].name, hello.samples[0]?.id ?? "");
  build();
  show();
  document.documentElement.dataset.asking ??= "0"; // a panel that asks nothing by itself
}

start().catch((failure) => say(`The page could not start: ${failure.message}`));
