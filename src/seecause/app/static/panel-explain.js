// Explain: maps side by side, a brush whose answers move, enough and needed, pairs of regions.

import { latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Answers, Chooser, JobBar, copyButtons, field, h, inGrid, same, scaleOf, segmented, select, short, slider, stroked, whenChanged } from "./parts.js";

const BLANKS = [["white", "white"], ["black", "black"], ["mean", "mean colour"], ["noise", "noise"], ["blur-noise", "soft noise"]];
const TAILS = [
  ["", "as the model wants it"], ["source", "patches stay as they were"], ["patched", "patches are computed again"],
  ["blank", "patches become the blank's"], ["all", "everything is computed again"],
];
const TOOLS = [["brush", "Brush"], ["erase", "Erase"], ["pair", "Two regions"]];
const OTHERS = ["legrad", "rollout", "ixg+", "grad-cam", "integrated-gradients", "attcat", "tam", "bt", "raw-attention", "caap+mosaic", "rise"];

const defaults = {
  picture: "s0", target: null, methods: "caap,mosaic", patches: [], tool: "brush",
  blank: "white", tail: "", first: 0, last: null, one: [], other: [], evidence: false,
};

function mount(root, tools) {
  const mine = () => tools.state().explain;
  const names = () => mine().methods.split(",").filter(Boolean);
  const common = () => {
    const { picture, target, blank, tail, first, last } = mine();
    const layers = tools.model().layers ?? 0;
    return { model: tools.state().model, picture, target, blank, tail: tail || null, first: Math.min(first, layers), last: last === null ? null : Math.min(last, layers) };
  };
  const brushed = () => ({ ...common(), patches: inGrid(mine().patches, tools.model()) });
  const regions = () => ({ ...common(), one: inGrid(mine().one, tools.model()), other: inGrid(mine().other, tools.model()) });
  const weighed = () => ({ ...common(), method: names()[0] ?? "caap" });

  // the picture, its tools and its answers
  const stage = new PatchPicture({ label: "The picture. Arrow keys move over patches, space brushes, with shift the brush stays down.", onhover: hover, onpaint: paint });
  const whole = new Answers("Whole picture", "as the model takes it");
  const only = new Answers("Only these", "brush some patches");
  const without = new Answers("Without these", "brush some patches");
  const job = new JobBar();
  const buttons = segmented("What the pointer does", TOOLS, (tool) => tools.set({ tool }));
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ patches: [], one: [], other: [] }) }, "Clear");
  const invert = h("button", { type: "button", class: "plain", onclick: () => {
    const before = new Set(mine().patches);
    const every = stage.rows * stage.columns;
    tools.set({ patches: Array.from({ length: every }, (_, place) => place).filter((place) => !before.has(place)) });
  } }, "Invert");
  const sets = h("button", { type: "button", class: "plain", "aria-pressed": "false", onclick: () => tools.set({ evidence: !mine().evidence }) }, "Enough and needed");
  const together = h("div", {}); // what two regions cause
  const weights = h("div", {}); // what is enough, and what is needed
  const words = h("div", { class: "finding", "aria-live": "polite" }, together, weights);
  const read = h("output", { class: "hover-read" });

  // settings
  const chooser = new Chooser(tools.hello, { onchoose: (picture) => tools.set({ picture, patches: [], one: [], other: [] }) });
  const classes = select([], { onchange: (value) => tools.set({ target: value === "" ? null : +value }) });
  const blank = select(BLANKS, { onchange: (value) => tools.set({ blank: value }) });
  const tail = select(TAILS, { onchange: (value) => tools.set({ tail: value }) });
  const layerWord = (layer) => (layer === 0 ? "embedding" : `block ${layer}`);
  const first = slider("first layer", { max: 12, value: 0, text: layerWord, oninput: (value) => tools.set({ first: value, last: mine().last === null ? null : Math.max(value, mine().last) }) });
  const last = slider("last layer", { max: 12, value: 12, text: layerWord, oninput: (value) => tools.set({ last: value, first: Math.min(value, mine().first) }) });
  const more = select([["", "add a map …"], ...["caap", "mosaic", ...OTHERS].map((name) => [name, name])], {
    "aria-label": "Add a map", onchange: (value) => {
      more.value = "";
      if (value && !names().includes(value)) tools.set({ methods: [...names(), value].join(",") });
    },
  });
  const strip = h("div", { class: "map-strip" });
  const maps = new Map(); // method -> {figure, picture, answer, job, key}

  root.append(
    h("div", { class: "layout" },
      h("aside", { class: "side", "aria-label": "Settings" },
        chooser.element,
        field("class explained", classes),
        h("details", { class: "settings", open: true }, h("summary", {}, "How patches are put in"),
          h("div", {}, field("blank", blank), field("after the last layer", tail), first, last))),
      h("div", { class: "work" },
        h("div", { class: "stage" },
          h("div", { class: "stage-picture" }, h("div", { class: "toolbar" }, buttons, clear, invert, sets), stage.element, read),
          h("div", { class: "stage-answers" }, whole.element, only.element, without.element, job.error, job.element, words)),
        h("div", { class: "strip-head" }, h("h2", {}, "Maps"), more),
        strip,
        copyButtons(() => tools.ask("copy", { ...brushed(), methods: names() })))),
  );

  const when = whenChanged();
  let shown = ""; // model and picture on the page
  let plain = null;

  function hover(place) {
    for (const { picture } of maps.values()) picture.setPatches("cursor", place === null ? [] : [place]);
    stage.setPatches("cursor", place === null ? [] : [place]);
    for (const drawn of maps.values()) {
      const lines = [];
      if (place !== null && drawn.answer && drawn.picture.rows === stage.rows) {
        const { by_class: rows, classes: named, values, label } = drawn.answer;
        if (rows.length) rows.forEach((row, index) => lines.push([named[index], row[place]]));
        else lines.push([label || "value", values[place]]);
      }
      if (!lines.length) drawn.values.replaceChildren(h("p", {}, "point at a patch: its value for each class"));
      else drawn.values.replaceChildren(...lines.map(([name, value]) => h("div", {}, h("span", {}, name), h("b", {}, short(value)))));
    }
    read.textContent = place === null ? "" : `${stage.where(place)}${mine().patches.includes(place) ? ", brushed" : ""}`;
    if (place !== null && document.activeElement === stage.stack) tools.say(read.textContent);
  }

  function paint(places, { first: begins, key }) {
    const { tool, patches, one, other } = mine();
    if (tool === "pair") {
      if (!begins) return;
      const region = around(places[0]);
      if (!one.length || other.length) tools.set({ one: region, other: [] });
      else tools.set({ other: region });
      return;
    }
    const after = stroked(patches, places, { first: begins, key, erase: tool === "erase" });
    if (after.length !== patches.length) tools.set({ patches: after });
  }

  function around(place) {
    const [row, column] = [Math.floor(place / stage.columns), place % stage.columns];
    const near = [];
    for (let r = Math.max(0, row - 1); r <= Math.min(stage.rows - 1, row + 1); r += 1) {
      for (let c = Math.max(0, column - 1); c <= Math.min(stage.columns - 1, column + 1); c += 1) near.push(r * stage.columns + c);
    }
    return near;
  }

  const look = latest(async () => {
    const { model, picture } = common();
    const key = `${model} ${picture}`;
    const answer = await job.watch((progress) => tools.ask("look", { model, picture }, { slot: "look", progress }));
    if (!answer) {
      shown = "";
      stage.clear();
      whole.clear();
      return;
    }
    plain = answer;
    shown = key;
    stage.setPicture(answer.picture, answer.grid, answer.size);
    stage.caption.textContent = answer.name;
    for (const drawn of maps.values()) drawn.picture.setPicture(answer.picture, answer.grid, answer.size);
    fillClasses();
    whole.show(answer.answers, mine().target ?? answer.predicted);
    marks();
  });

  const brushing = latest(async () => {
    const request = brushed();
    const many = request.patches.length;
    const answer = many ? await job.watch((progress) => tools.ask("brush", request, { slot: "brush", progress })) : null;
    for (const [card, bars] of [[only, answer?.only], [without, answer?.without]]) {
      if (bars) card.show(bars, request.target ?? answer.predicted);
      else card.clear();
      card.say(bars ? `${answer.patches} of ${stage.rows * stage.columns} patches` : many ? "no answer" : "brush some patches");
    }
  });

  const pairing = latest(async () => {
    const request = regions();
    if (!request.one.length || !request.other.length) {
      const hint = request.one.length ? "Now click the second region." : "Click two regions: what do they cause together?";
      together.replaceChildren(...(mine().tool === "pair" ? [h("p", {}, hint)] : []));
      return;
    }
    const answer = await job.watch((progress) => tools.ask("pair", request, { slot: "pair", progress }));
    together.replaceChildren(...(answer ? [pairWords(answer)] : []));
  });

  const weighing = latest(async () => {
    const request = weighed();
    forgetEvidence();
    if (!mine().evidence) return;
    const answer = await job.watch((progress) => tools.ask("evidence", request, { slot: "evidence", progress }));
    if (!answer || !mine().evidence || !same(request, weighed())) return;
    stage.setPatches("enough", answer.enough.exists ? answer.enough.patches : []);
    stage.setPatches("needed", answer.needed.exists ? answer.needed.patches : []);
    weights.replaceChildren(h("p", {}, h("span", { class: "key enough" }), answer.sentences[0]), h("p", {}, h("span", { class: "key needed" }), answer.sentences[1]));
  });

  function forgetEvidence() {
    stage.setPatches("enough", []);
    stage.setPatches("needed", []);
    weights.replaceChildren();
  }

  function drawMaps() {
    for (const [method, drawn] of maps) {
      if (names().includes(method)) continue;
      drawn.figure.remove();
      maps.delete(method);
    }
    for (const method of names()) {
      if (!maps.has(method)) maps.set(method, newMap(method));
      const drawn = maps.get(method);
      strip.append(drawn.figure);
      const request = { ...common(), method };
      const key = JSON.stringify(request);
      if (drawn.key !== key) {
        drawn.key = key;
        drawn.answer = null;
        drawn.figure.classList.add("stale");
        drawn.draw();
      }
    }
  }

  function newMap(method) {
    const picture = new PatchPicture({ label: `Map by ${method}. Arrow keys move over patches.`, onhover: hover });
    const own = new JobBar();
    const scale = h("div", { class: "scale" });
    const values = h("div", { class: "patch-values" }, h("p", {}, "point at a patch: its value for each class"));
    const close = h("button", { type: "button", class: "close", "aria-label": `remove the map by ${method}`, onclick: () => tools.set({ methods: names().filter((name) => name !== method).join(",") }) }, "×");
    const seconds = h("span", { class: "small" });
    const figure = h("article", { class: "map-card", "data-method": method }, h("header", {}, h("h3", {}, method), seconds, close), own.error, own.element, picture.element, scale, values);
    const drawn = { figure, picture, values, answer: null, key: "" };
    drawn.draw = latest(async () => {
      const asked = drawn.key;
      const answer = await own.watch((progress) => tools.ask("draw", { ...common(), method }, { slot: `draw ${method}`, progress }));
      if (!answer || drawn.key !== asked) return;
      drawn.answer = answer;
      figure.classList.remove("stale");
      if (plain) picture.setPicture(plain.picture, answer.grid, plain.size);
      picture.setHeat(answer.layer);
      picture.caption.textContent = answer.label ? `for ${answer.label}` : "";
      picture.stack.title = answer.summary;
      seconds.textContent = `${answer.seconds.toFixed(2)} s`;
      scale.replaceChildren(...scaleOf(answer, answer.remark));
    });
    return drawn;
  }

  function fillClasses() {
    const { classes: every } = tools.model();
    when("classes", tools.state().model, () => classes.replaceChildren(h("option", { value: "" }, "the answer"), ...every.map((name, index) => h("option", { value: `${index}` }, name))));
    classes.value = mine().target === null ? "" : `${mine().target}`;
  }

  function marks() {
    const { patches, one, other, evidence, tool } = mine();
    stage.setPatches("brush", patches, { fill: true });
    stage.setPatches("brush-line", patches);
    stage.setPatches("one", one);
    stage.setPatches("other", other);
    sets.setAttribute("aria-pressed", String(evidence));
    buttons.choose(tool);
  }

  function update(state) {
    const { layers } = tools.model();
    const { target, ...settings } = mine();
    if (target !== null && target >= tools.model().classes.length) state.explain.target = null;
    chooser.choose(settings.picture);
    fillClasses();
    blank.value = settings.blank;
    tail.value = settings.tail;
    first.hidden = last.hidden = tail.closest(".field").hidden = layers === undefined;
    first.set(settings.first, layers);
    last.set(settings.last ?? layers, layers);
    last.input.disabled = ["", "source"].includes(settings.tail);
    marks();
    const key = common();
    if (shown !== `${key.model} ${key.picture}`) look();
    else whole.show(plain.answers, mine().target ?? plain.predicted);
    when("brush", brushed(), brushing);
    when("pair", { ...regions(), tool: settings.tool }, pairing);
    when("evidence", settings.evidence && weighed(), weighing);
    drawMaps();
  }

  return { update };
}

function pairWords({ label, one, other, joint, interaction }) {
  const verdict = Math.abs(interaction) < 0.05 * Math.max(Math.abs(joint), 0.1) ? "they add up"
    : interaction > 0 ? "they need each other" : "each will do without the other";
  const number = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`;
  return h("p", {}, `For ${label}, in logits: the first region alone `, h("b", {}, number(one)), ", the second alone ", h("b", {}, number(other)),
    ", both ", h("b", {}, number(joint)), ". More than their sum: ", h("b", { class: "interaction" }, number(interaction)), `; ${verdict}.`);
}

export const panel = { defaults, mount };
