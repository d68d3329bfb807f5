// Heads: a grid of layers x heads coloured by a score; heads are clicked off, and answers, the
// background's share and maps are seen before and after.

import { latest } from "./api.js";
import { HeadButtons, PatchPicture } from "./grid.js";
import { Answers, Jobs, barRow, classPicker, copyButtons, field, h, inGrid, same, saveFile, scaleOf, select, stroked, toggled, whenChanged } from "./parts.js";

const SCORES = [["answer", "loss of the prediction without it"], ["background", "loss of the background’s effect"], ["object", "loss of the object’s effect"]];
const defaults = { target: null, by: "answer", off: [], brushed: [], maps: true };

function mount(root, tools) {
  const mine = () => tools.state().heads;
  const common = () => ({ model: tools.state().model, picture: tools.state().image, target: mine().target, brushed: inGrid(mine().brushed, tools.model()) });
  const scored = () => ({ ...common(), brushed: mine().by === "answer" ? [] : common().brushed, by: mine().by });
  const mapped = () => ({ ...request(), brushed: [] });
  const request = () => ({ ...common(), off: mine().off.filter((place) => place < width() * tools.model().layers) });
  const width = () => Math.max(...tools.model().heads);

  const job = new Jobs();
  const mapJob = new Jobs();
  const classes = classPicker((target) => tools.set({ target }));
  const by = select(SCORES, { onchange: (value) => tools.set({ by: value }) });
  const picture = new PatchPicture({ label: "The image. Space brushes patches of the object, where the data has no mask.", onpaint: paint });
  const before = new Answers("All heads on", "as the model is");
  const after = new Answers("Some off", "click heads in the grid");
  const share = h("div", { class: "answer-card share" }, h("h2", {}, "Dependence on background"));
  const shareBody = h("div", {});
  share.append(shareBody);
  const grid = new HeadButtons("off", (place) => tools.set({ off: toggled(mine().off, place) }));
  const legend = h("p", { class: "small" });
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ off: [] }) }, "All on");
  const worst = h("button", { type: "button", class: "plain", onclick: () => tools.set({ off: highest(4) }) }, "Four highest off");
  const unbrush = h("button", { type: "button", class: "plain", onclick: () => tools.set({ brushed: [] }) }, "Forget the brushed object");
  const save = h("button", { type: "button", class: "plain", onclick: () => exporting() }, "Export the checkpoint");
  const saved = h("span", { class: "small", role: "status" });
  const pictures = { before: new PatchPicture({ label: "CAAP with all heads", caption: "all heads on" }), after: new PatchPicture({ label: "CAAP without the heads", caption: "these heads at zero" }) };
  const scale = h("div", { class: "scale" });

  const copying = copyButtons(tools, () => tools.ask("copy", request()));
  root.append(
    h("div", { class: "heads-top" },
      h("section", { class: "heads-grid" }, h("div", { class: "toolbar" }, field("Colour", by), classes, clear, worst), h("div", { class: "scroll" }, grid.element), legend),
      h("div", { class: "heads-picture" }, picture.element, unbrush)),
    job.error,
    h("div", { class: "stage-answers" }, before.element, after.element, share),
    h("div", { class: "strip-head" }, h("h2", {}, "Maps before and after")), mapJob.error,
    h("div", { class: "map-strip" }, Object.values(pictures).map((part) => h("article", { class: "map-card" }, part.element)), scale),
    h("div", { class: "buttons export" }, save, saved),
    copying);

  let scores = null;

  function highest(count) {
    if (!scores) return [];
    const every = scores.values.flatMap((row, layer) => row.map((value, head) => [value ?? -Infinity, layer * width() + head]));
    return every.sort((one, other) => other[0] - one[0]).slice(0, count).filter(([value]) => value > 0).map(([, place]) => place).sort((x, y) => x - y);
  }

  function paint(places, how) {
    const brushed = stroked(mine().brushed, places, how);
    if (brushed.length !== mine().brushed.length) tools.set({ brushed });
  }

  function colour() {
    grid.colour(scores?.values ?? null, mine().off);
    worst.disabled = !scores;
    legend.textContent = scores ? `Orange: ${scores.by === "answer" ? "the prediction" : `the effect of the ${scores.by}`} loses so much (${scores.unit}) without the head; blue: it gains. Pressed heads are off.` : "";
  }

  const look = latest(async () => {
    const { model, picture: id } = common();
    const answer = await job.watch((progress) => tools.ask("look", { model, picture: id }, { panel: "explain", slot: "look heads", progress }));
    for (const part of [picture, ...Object.values(pictures)]) {
      if (answer) part.setPicture(answer.picture, answer.grid, answer.size);
      else part.clear();
    }
    if (!answer) return;
    picture.caption.textContent = answer.name;
    marks();
  });

  const scoring = latest(async () => {
    const asked = scored();
    scores = null;
    colour();
    const answer = await job.watch((progress) => tools.ask("score", asked, { slot: "score", progress }));
    if (!answer || !same(asked, scored())) return;
    scores = answer;
    colour();
  });

  const switching = latest(async () => {
    const answer = await job.watch((progress) => tools.ask("switch", request(), { slot: "switch", progress }));
    if (!answer) {
      before.clear();
      after.clear();
      after.say("no answer");
      shareBody.replaceChildren();
      return;
    }
    const target = mine().target ?? answer.predicted;
    before.show(answer.before, target);
    after.show(answer.after, target);
    after.say(answer.heads ? `${answer.heads} ${answer.heads === 1 ? "head" : "heads"} off` : "click heads in the grid");
    shareBody.replaceChildren(...shares(answer));
  });

  const mapping = latest(async () => {
    const asked = mapped();
    for (const part of Object.values(pictures)) part.setHeat("");
    scale.replaceChildren();
    const answer = await mapJob.watch((progress) => tools.ask("maps", asked, { slot: "head maps", progress }));
    if (!answer || !same(asked, mapped())) return;
    for (const name of ["before", "after"]) {
      pictures[name].setHeat(answer[name].layer);
      pictures[name].stack.setAttribute("data-sum", answer[name].values.reduce((sum, value) => sum + (value ?? 0), 0).toFixed(4));
    }
    scale.replaceChildren(...scaleOf(answer.before, `CAAP for ${answer.label}, both on one scale`));
  });

  async function exporting() {
    saved.textContent = "";
    const answer = await job.watch((progress) => tools.ask("export", mapped(), { slot: "export", progress }));
    if (!answer) return;
    saved.textContent = `${await saveFile(answer)}; sc.load opens the unpacked folder.`;
  }

  function marks() {
    picture.setPatches("brush", mine().brushed, { fill: true });
    picture.setPatches("brush-line", mine().brushed);
    unbrush.hidden = mine().brushed.length === 0;
  }

  const when = whenChanged();
  function update() {
    copying.update();
    if (mine().target !== null && mine().target >= tools.model().classes.length) mine().target = null;
    const { model } = common();
    when("grid", model, () => {
      scores = null;
      grid.build(tools.model());
    });
    classes.set(tools.model().classes, mine().target);
    by.value = mine().by;
    marks();
    colour();
    save.disabled = mine().off.length === 0;
    when("look", [model, tools.state().image], look);
    when("score", scored(), scoring);
    when("switch", request(), switching);
    when("maps", mapped(), mapping);
  }

  return { update };
}

function shares({ background }) {
  if (!background) return [h("p", { class: "small" }, "Brush the object in the image: the data has no mask of it.")];
  const words = ["all heads on", "some off"];
  return [
    h("ol", { class: "answers" }, background.map(({ share }, index) =>
      barRow(words[index], share === null ? "–" : `${(100 * share).toFixed(1)} %`, share ?? 0, index ? "explained" : ""))),
    h("p", { class: "small" }, "BIG / (FIG + BIG): at 0 % only the object counts, at 100 % only the background. Switched-off heads are replaced with zeros."),
  ];
}

export const panel = { defaults, perImage: ["brushed"], mount };
