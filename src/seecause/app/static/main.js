// The page: panels as tabs, one model for all of them, one state in the hash.

import * as api from "./api.js";
import { chooseByArrow, h } from "./parts.js";
import { declare, decode, encode } from "./state.js";

const tabs = document.querySelector(".tabs");
const main = document.querySelector("main");
const question = document.querySelector("#question");
const notice = document.querySelector("#notice");
const models = document.querySelector("#model");
const live = document.querySelector("#live");

let hello;
let state;
let written = "";
const opened = new Map(); // panels that were built: {root, update}
const modules = new Map();

// what a panel needs, and a model to begin with where none of the served ones fits
const KINDS = {
  classifier: ["a classifier", "builtin:critters-vit"],
  ifam: ["a classifier made of parts (iFAM)", "builtin:critters-ifam"],
  lvlm: ["a vision-language model", "builtin:critters-llava"],
};

const fits = (panel, model) => panel.kinds.length === 0 || panel.kinds.includes(model.kind);
const modelsOf = (panel) => hello.models.filter((model) => fits(panel, model));

function write() {
  const hash = encode(state);
  if (hash === written) return;
  written = hash;
  history.replaceState(null, "", hash);
}

let scheduled = 0;
function soon() { // dragging changes the state often; the address need not follow each time
  clearTimeout(scheduled);
  scheduled = setTimeout(write, 120);
}

function toolsOf(name) {
  return {
    hello,
    set(changes) {
      Object.assign(state[name], changes);
      soon();
      opened.get(name).update(state, Object.keys(changes));
    },
    state: () => state,
    model: () => hello.models.find((model) => model.key === state.model),
    ask: (action, request, options = {}) => api.ask(options.panel ?? name, action, request, options),
    say(words) { live.textContent = words; },
  };
}

function show() {
  const panel = hello.panels.find((known) => known.name === state.panel);
  const able = modelsOf(panel);
  if (panel.kinds.length && !able.some((model) => model.key === state.model)) {
    if (state.model && hello.models.every((model) => model.key !== state.model)) {
      say(`This link is about the model ${state.model}, which is not served here.`);
    }
    state.model = able[0]?.key ?? state.model;
  }
  models.replaceChildren(...able.map((model) => h("option", { value: model.key }, model.key)));
  models.value = state.model;
  models.closest("label").hidden = able.length === 0 || panel.kinds.length === 0;
  question.textContent = panel.question;
  if (panel.kinds.length && !able.length) {
    const [what, example] = KINDS[panel.kinds[0]];
    say(`${panel.title} needs ${what}, and none is served. Start the server with one: seecause serve --model ${example}`);
  }
  document.title = `seecause: ${panel.title}`;
  for (const tab of tabs.children) {
    const chosen = tab.dataset.panel === panel.name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  for (const [name, { root }] of opened) root.hidden = name !== panel.name;
  if (panel.kinds.length && !able.length) return;
  if (!opened.has(panel.name)) {
    const root = h("div", { class: "panel", role: "tabpanel", id: `panel-${panel.name}`, "aria-labelledby": `tab-${panel.name}` });
    main.append(root);
    const built = modules.get(panel.name).mount(root, toolsOf(panel.name));
    opened.set(panel.name, { root, ...built });
  }
  opened.get(panel.name).update(state, null);
  write();
}

function say(words) {
  notice.textContent = words;
  notice.hidden = !words;
}

function go(panel) {
  state.panel = panel;
  written = encode(state);
  history.pushState(null, "", written);
  say("");
  show();
}

function build() {
  for (const { name, title } of hello.panels) {
    tabs.append(h("button", {
      type: "button", role: "tab", id: `tab-${name}`, "data-panel": name, "aria-controls": `panel-${name}`,
      onclick: () => go(name),
      onkeydown: (event) => chooseByArrow(event, tabs.children, { ArrowRight: 1, ArrowLeft: -1 }),
    }, title));
  }
  models.addEventListener("change", () => {
    state.model = models.value;
    show();
  });
  window.addEventListener("hashchange", () => {
    if (location.hash === written) return;
    state = decode(location.hash, hello.panels[0].name);
    written = location.hash;
    say("");
    show();
  });
}

// Panels begin with samples that are there, however few.
function present(defaults) {
  const last = hello.samples.length - 1;
  const there = (value) => hello.samples[Math.min(+value.slice(1), last)]?.id ?? value;
  const named = (value) => typeof value === "string" && /^s\d+$/.test(value);
  return Object.fromEntries(Object.entries(defaults).map(([name, value]) => [name, named(value) ? there(value) : value]));
}

async function start() {
  hello = await api.hello();
  const failed = [];
  await Promise.all(hello.panels.map(async ({ name, title }) => {
    const loaded = await import(`./panel-${name}.js`).catch(() => null);
    if (loaded) modules.set(name, loaded.panel);
    else failed.push(title);
  }));
  hello.panels = hello.panels.filter(({ name }) => modules.has(name));
  if (failed.length) say(`These panels could not be loaded: ${failed.join(", ")}.`);
  for (const { name } of hello.panels) declare(name, present(modules.get(name).defaults)); // in the order of tabs
  state = decode(location.hash, hello.panels[0].name);
  build();
  show();
  document.documentElement.dataset.asking ??= "0"; // a panel that asks nothing by itself
}

start().catch((failure) => say(`The page could not start: ${failure.message}`));
