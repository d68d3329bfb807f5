// Heads: a grid of layers x heads coloured by a score; heads are clicked off, and answers, the
// background's share and maps are seen before and after.

import { download, latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Answers, Chooser, JobBar, copyButtons, field, h, scaleOf, select, short } from "./parts.js";

const SCORES = [["answer", "what the answer loses without it"], ["background", "what the background's part loses"], ["object", "what the object's part loses"]];
const OPERATORS = [["zero", "nothing (zeros)"], ["mean", "their mean over the samples"], ["other", "those of another picture"]];
const defaults = { picture: "s8", target: null, by: "answer", off: [], operator: "zero", other: "s1", brushed: [], maps: true };

function mount(root, tools) {
  const mine = () => tools.state().heads;
  const common = () => ({ model: tools.state().model, picture: mine().picture, target: mine().target, brushed: mine().brushed });
  const request = () => {
    const { off, operator, other } = mine();
    return { ...common(), off: off.filter((place) => place < width() * tools.model().layers), operator, other: operator === "other" ? other : null };
  };
  const width = () => Math.max(...tools.model().heads);

  const job = new JobBar();
  const mapJob = new JobBar();
  const chooser = new Chooser(tools.hello, { onchoose: (picture) => tools.set({ picture, brushed: [] }) });
  const donor = new Chooser(tools.hello, { label: "Other picture", pastes: false, onchoose: (other) => tools.set({ other }) });
  const donorField = h("div", { class: "field" }, h("span", { class: "small" }, "the other picture"), donor.element);
  const classes = select([], { onchange: (value) => tools.set({ target: value === "" ? null : +value }) });
  const by = select(SCORES, { onchange: (value) => tools.set({ by: value }) });
  const operator = select(OPERATORS, { onchange: (value) => tools.set({ operator: value }) });
  const picture = new PatchPicture({ label: "The picture. Space brushes patches of the object, if the data does not know it.", onpaint: paint });
  const before = new Answers("All heads on", "as the model is");
  const after = new Answers("Some off", "click heads in the grid");
  const share = h("div", { class: "answer-card share" }, h("h3", {}, "Background’s share"));
  const shareBody = h("div", {});
  share.append(shareBody);
  const grid = h("table", { class: "head-buttons" });
  const legend = h("p", { class: "small" });
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ off: [] }) }, "All on");
  const worst = h("button", { type: "button", class: "plain", onclick: () => tools.set({ off: highest(4) }) }, "Four highest off");
  const unbrush = h("button", { type: "button", class: "plain", onclick: () => tools.set({ brushed: [] }) }, "Forget the brushed object");
  const save = h("button", { type: "button", class: "plain", onclick: () => exporting() }, "Export the checkpoint");
  const saved = h("span", { class: "small", role: "status" });
  const pictures = { before: new PatchPicture({ label: "CAAP with all heads", caption: "all heads on" }), after: new PatchPicture({ label: "CAAP without the heads", caption: "these heads at zero" }) };
  const scale = h("div", { class: "scale" });

  root.append(h("div", { class: "layout" },
    h("aside", { class: "side", "aria-label": "Settings" }, chooser.element, field("class explained", classes), field("heads that are off carry", operator), donorField),
    h("div", { class: "work" },
      h("div", { class: "heads-top" },
        h("section", { class: "heads-grid" }, h("div", { class: "toolbar" }, field("colour", by), clear, worst), h("div", { class: "scroll" }, grid), legend),
        h("div", { class: "heads-picture" }, picture.element, unbrush)),
      job.error, job.element,
      h("div", { class: "stage-answers" }, before.element, after.element, share),
      h("div", { class: "strip-head" }, h("h2", {}, "Maps before and after")), mapJob.error, mapJob.element,
      h("div", { class: "map-strip" }, Object.values(pictures).map((part) => h("article", { class: "map-card" }, part.element)), scale),
      h("div", { class: "buttons export" }, save, saved),
      copyButtons(() => tools.ask("copy", request())))));

  let scores = null;
  let plain = null;

  function highest(count) {
    if (!scores) return [];
    const every = scores.values.flatMap((row, layer) => row.map((value, head) => [value ?? -Infinity, layer * width() + head]));
    return every.sort((one, other) => other[0] - one[0]).slice(0, count).filter(([value]) => value > 0).map(([, place]) => place).sort((x, y) => x - y);
  }

  function paint(places, { first: begins, key }) {
    const brushed = new Set(mine().brushed);
    const erase = key && begins && brushed.has(places[0]);
    for (const place of places) erase ? brushed.delete(place) : brushed.add(place);
    if (brushed.size !== mine().brushed.length) tools.set({ brushed: [...brushed].sort((x, y) => x - y) });
  }

  function toggle(place) {
    const off = new Set(mine().off);
    if (!off.delete(place)) off.add(place);
    tools.set({ off: [...off].sort((x, y) => x - y) });
  }

  function buildGrid() {
    const { layers, heads } = tools.model();
    const columns = Array.from({ length: width() }, (_, head) => head);
    grid.replaceChildren(
      h("caption", { class: "quiet" }, "Heads, layer by layer; a pressed button is a head that is off"),
      h("thead", {}, h("tr", {}, h("td"), columns.map((head) => h("th", { scope: "col" }, String(head + 1))))),
      h("tbody", {}, Array.from({ length: layers }, (_, layer) => h("tr", {}, h("th", { scope: "row" }, `block ${layer + 1}`),
        columns.map((head) => h("td", {}, head < heads[layer] ? headButton(layer, head) : null))))));
  }

  function headButton(layer, head) {
    const place = layer * width() + head;
    const button = h("button", { type: "button", "data-place": String(place), onclick: () => toggle(place), onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width(), ArrowUp: -width() }[event.key];
      const next = step && grid.querySelector(`[data-place="${place + step}"]`);
      if (!next) return;
      event.preventDefault();
      next.focus();
    } });
    return button;
  }

  function colour() {
    const off = new Set(mine().off);
    const values = scores ? scores.values.flat().filter((value) => value !== null) : [];
    const reach = Math.max(...values.map(Math.abs), 1e-12);
    for (const button of grid.querySelectorAll("button")) {
      const place = +button.dataset.place;
      const [layer, head] = [Math.floor(place / width()), place % width()];
      const value = scores?.values[layer]?.[head] ?? null;
      button.className = value === null ? "none" : value >= 0 ? "for" : "against";
      button.style.setProperty("--strength", `${value === null ? 0 : 100 * Math.min(1, Math.abs(value) / reach)}%`);
      button.textContent = value === null ? "" : short(value);
      button.setAttribute("aria-pressed", String(off.has(place)));
      button.setAttribute("aria-label", `block ${layer + 1}, head ${head + 1}: ${short(value)}${off.has(place) ? ", off" : ""}`);
    }
    legend.textContent = scores ? `Orange: ${scores.by === "answer" ? "the answer" : `the ${scores.by}'s part`} loses so much (${scores.unit}) without the head; blue: it gains. Pressed heads are off.` : "";
  }

  const look = latest(async () => {
    const { model, picture: id } = common();
    const answer = await job.watch((progress) => tools.ask("look", { model, picture: id }, { panel: "explain", slot: "look heads", progress }));
    if (!answer) return;
    plain = answer;
    for (const part of [picture, ...Object.values(pictures)]) part.setPicture(answer.picture, answer.grid, answer.size);
    picture.caption.textContent = answer.name;
    marks();
  });

  const scoring = latest(async () => {
    const answer = await job.watch((progress) => tools.ask("score", { ...common(), by: mine().by }, { slot: "score", progress }));
    scores = answer ?? null;
    colour();
  });

  const switching = latest(async () => {
    const answer = await job.watch((progress) => tools.ask("switch", request(), { slot: "switch", progress }));
    if (!answer) return;
    const target = mine().target ?? answer.predicted;
    before.show(answer.before, target);
    after.show(answer.after, target);
    after.say(answer.heads ? `${answer.heads} ${answer.heads === 1 ? "head" : "heads"} off` : "click heads in the grid");
    shareBody.replaceChildren(...shares(answer));
  });

  const mapping = latest(async () => {
    const answer = await mapJob.watch((progress) => tools.ask("maps", { ...request(), operator: "zero", other: null }, { slot: "head maps", progress }));
    if (!answer) return;
    for (const name of ["before", "after"]) {
      pictures[name].setHeat(answer[name].layer);
      pictures[name].stack.setAttribute("data-sum", answer[name].values.reduce((sum, value) => sum + (value ?? 0), 0).toFixed(4));
    }
    scale.replaceChildren(...scaleOf(answer.before, `CAAP for ${answer.label}, both on one scale`));
  });

  async function exporting() {
    saved.textContent = "";
    const answer = await job.watch((progress) => tools.ask("export", { ...request(), operator: "zero", other: null }, { slot: "export", progress }));
    if (!answer) return;
    const { name, blob } = await download(answer.file);
    const link = h("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    URL.revokeObjectURL(link.href);
    saved.textContent = `${name}, ${(answer.bytes / 1e6).toFixed(1)} MB; sc.load opens the unpacked folder.`;
  }

  function marks() {
    picture.setPatches("brush", mine().brushed, { fill: true });
    picture.setPatches("brush-line", mine().brushed);
    unbrush.hidden = mine().brushed.length === 0;
    donorField.hidden = mine().operator !== "other";
  }

  const seen = {};
  function update() {
    if (tools.model().layers === undefined) {
      job.error.textContent = "This model has no attention heads; choose a transformer.";
      job.error.hidden = false;
      return;
    }
    if (mine().target !== null && mine().target >= tools.model().classes.length) mine().target = null;
    const { model } = common();
    const when = (name, question, run) => {
      const text = JSON.stringify(question);
      if (seen[name] === text) return;
      seen[name] = text;
      run();
    };
    when("grid", model, () => {
      scores = null;
      buildGrid();
      classes.replaceChildren(h("option", { value: "" }, "the answer"), ...tools.model().classes.map((name, index) => h("option", { value: `${index}` }, name)));
    });
    classes.value = mine().target === null ? "" : `${mine().target}`;
    by.value = mine().by;
    operator.value = mine().operator;
    chooser.choose(mine().picture);
    donor.choose(mine().other);
    marks();
    colour();
    save.disabled = mine().off.length === 0;
    when("look", [model, mine().picture], look);
    when("score", [common(), mine().by], scoring);
    when("switch", request(), switching);
    when("maps", [common(), mine().off], mapping);
  }

  return { update };
}

function shares({ background }) {
  if (!background) return [h("p", { class: "small" }, "Brush the object in the picture: the data does not know it.")];
  const words = ["all heads on", "some off"];
  return [
    h("ol", { class: "answers" }, background.map(({ share }, index) => {
      const inner = h("span");
      inner.style.width = `${100 * (share ?? 0)}%`;
      return h("li", { class: index ? "explained" : "" }, h("span", { class: "name" }, words[index]), h("span", { class: "value" }, share === null ? "–" : share.toFixed(3)), h("span", { class: "track" }, inner));
    })),
    h("p", { class: "small" }, "BIG / (FIG + BIG): 0 is all object, 1 is all background."),
  ];
}

export const panel = { defaults, mount };
