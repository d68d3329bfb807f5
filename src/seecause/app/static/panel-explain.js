// Explain: the image and its best map under a wipe handle, one sentence, and one button that changes
// the image so that the prediction shows what it depends on. A brush asks the same of any patches.

import { latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Answers, Jobs, classPicker, copyButtons, details, field, firstName, h, inGrid, nextStep, percent, same, scaleOf, segmented, select, slider, stroked, whenChanged } from "./parts.js";

const BLANKS = [["white", "white"], ["black", "black"], ["mean", "mean colour"], ["noise", "noise"], ["blur-noise", "soft noise"]];
const TAILS = [
  ["", "default"], ["source", "patches stay as they were"], ["patched", "patches are computed again"],
  ["blank", "patches become the fill's"], ["all", "everything is computed again"],
];
const TOOLS = [["wipe", "Wipe"], ["brush", "Brush"], ["erase", "Erase"], ["pair", "Two regions"]];

// `shown`: "" the image, "erased" the image without the patches that the map marks, or a number: the
// object on that background
const defaults = { target: null, shown: "", patches: [], tool: "wipe", blank: "white", tail: "", first: 0, last: null, one: [], other: [] };
const perImage = ["shown", "patches", "one", "other"];

function mount(root, tools) {
  const mine = () => tools.state().explain;
  const on = () => ({ model: tools.state().model, picture: tools.state().image });
  const common = () => {
    const { target, blank, tail, first, last } = mine();
    const layers = tools.model().layers ?? 0;
    return { ...on(), target, blank, tail: tail || null, first: Math.min(first, Math.max(layers - 1, 0)), last: last === null ? null : Math.min(last, layers) };
  };
  const brushed = () => ({ ...common(), patches: inGrid(mine().patches, tools.model()) });
  const regions = () => ({ ...common(), one: inGrid(mine().one, tools.model()), other: inGrid(mine().other, tools.model()) });
  const marked = () => ({ ...on(), target: mine().target });

  let plain = null; // what the model predicts for the image
  let map = null; // the map that predicts best here, and what was tried beside it
  let moved = null; // the object on other backgrounds

  const stage = new PatchPicture({ label: "The image. Arrow keys move over patches; while the brush is on, space brushes.", onpaint: paint, onhover: hover });
  stage.addWipe();
  const read = h("output", { class: "hover-read" });
  const scale = h("div", { class: "scale" });
  const sentence = h("p", { class: "headline", role: "status" });
  const act = h("button", { type: "button", class: "go", onclick: change }, "Change the background");
  const back = h("button", { type: "button", onclick: () => tools.set({ shown: "" }) }, "Back to the image");
  const then = h("p", { class: "then", role: "status" });
  const whole = new Answers("Prediction");
  const only = new Answers("Only these patches");
  const without = new Answers("Without these patches");
  const job = new Jobs();
  const mapJob = new Jobs();
  const buttons = segmented("What the pointer does", TOOLS, (tool) => tools.set({ tool, shown: "" }));
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ patches: [], one: [], other: [] }) }, "Clear");
  const invert = h("button", { type: "button", class: "plain", onclick: () => {
    const before = new Set(mine().patches);
    tools.set({ patches: Array.from({ length: stage.rows * stage.columns }, (_, at) => at).filter((at) => !before.has(at)) });
  } }, "Invert");
  const together = h("div", { class: "finding", "aria-live": "polite" });
  const brushCards = h("div", { class: "stage-answers two" }, only.element, without.element);

  const classes = classPicker((target) => tools.set({ target }));
  const blank = select(BLANKS, { onchange: (value) => tools.set({ blank: value }) });
  const tail = select(TAILS, { onchange: (value) => tools.set({ tail: value }) });
  const layerWord = (layer) => (layer === 0 ? "embedding" : `block ${layer}`);
  const first = slider("First layer", { max: 11, value: 0, text: layerWord, oninput: (value) => tools.set({ first: value, last: mine().last === null ? null : Math.max(value + 1, mine().last) }) });
  const last = slider("Last layer", { min: 1, max: 12, value: 12, text: layerWord, oninput: (value) => tools.set({ last: value, first: Math.min(value - 1, mine().first) }) });
  const copying = copyButtons(tools, () => tools.ask("copy", { ...brushed(), methods: map ? [map.best] : [] }));

  root.append(
    h("div", { class: "first" },
      h("div", { class: "stage-picture" }, stage.element, scale),
      h("div", { class: "says" }, sentence, h("div", { class: "buttons" }, act, back), then, job.error, mapJob.error, whole.element)),
    h("div", { class: "toolbar" }, buttons, clear, invert, read),
    brushCards, together,
    details("Advanced: how patches are tested", h("div", { class: "fields" }, classes, field("Fill hidden areas with", blank), field("Later layers", tail), first, last)),
    nextStep(tools, "doubt", "Next: doubt this map"), copying);

  function hover(place) {
    stage.setPatches("cursor", place === null ? [] : [place]);
    const drawn = map?.maps.find(({ method }) => method === map.best);
    const value = place === null || !drawn || drawn.grid[0] !== stage.rows ? "" : `: ${drawn.values[place]}`;
    read.textContent = place === null ? "" : `${stage.where(place)}${value}${mine().patches.includes(place) ? ", brushed" : ""}`;
    if (place !== null && document.activeElement === stage.stack) tools.say(read.textContent);
  }

  function paint(places, { first: begins, key }) {
    const { tool, patches, one, other } = mine();
    if (tool === "wipe") return;
    if (tool === "pair") {
      if (!begins) return;
      const region = stage.around(places[0]);
      tools.set(!one.length || other.length ? { one: region, other: [] } : { other: region });
      return;
    }
    const after = stroked(patches, places, { first: begins, key, erase: tool === "erase" });
    if (after.length !== patches.length) tools.set({ patches: after });
  }

  // The primary button: the next background, those that change the prediction first; where the
  // object is not known, the image without the patches that the map marks.
  function change() {
    const ways = order();
    const at = ways.indexOf(mine().shown);
    tools.set({ shown: ways[(at + 1) % ways.length] ?? "", tool: "wipe" });
  }

  function order() {
    if (!moved?.tiles.length) return map ? ["erased"] : [];
    const good = moved.tiles.map((tile, index) => [tile, `${index}`]).filter(([tile]) => !tile.bad);
    const rank = ([tile]) => (tile.answer === moved.plain.find(({ leads }) => leads).name ? 1 : 0);
    return good.sort((one, two) => rank(one) - rank(two)).map(([, index]) => index);
  }

  const look = latest(async () => {
    const asked = on();
    plain = map = moved = null;
    stage.setHeat("");
    draw();
    const answer = await job.watch((progress) => tools.ask("look", asked, { slot: "look", progress }));
    if (!answer || !same(asked, on())) {
      if (!answer) stage.clear();
      return;
    }
    plain = answer;
    draw();
  });

  const mapping = latest(async () => {
    const asked = { ...common() };
    map = null;
    stage.setHeat("");
    const answer = await mapJob.watch((progress) => tools.ask("compare", asked, { panel: "doubt", slot: "compare", progress }));
    if (!answer || !same(asked, common())) return;
    map = answer;
    draw();
  });

  const moving = latest(async () => {
    const asked = on();
    moved = null;
    const answer = await mapJob.watch((progress) => tools.ask("place", asked, { panel: "test", slot: "place", progress }));
    if (!answer || !same(asked, on())) return;
    moved = answer;
    draw();
  });

  // Everything that follows from what was answered so far.
  function draw() {
    act.disabled = !(moved?.tiles.length || (moved && map));
    if (!plain) {
      sentence.textContent = then.textContent = "";
      whole.clear();
      return;
    }
    const { shown } = mine();
    const tile = shown === "" || shown === "erased" ? null : moved?.tiles[+shown];
    const erased = shown === "erased" ? map?.erased : null;
    const best = map?.maps.find(({ method }) => method === map.best);
    stage.setPicture(tile?.picture ?? erased?.picture ?? plain.picture, plain.grid, plain.size);
    stage.setHeat(shown === "" && best ? best.layer : "");
    stage.caption.textContent = tile ? `on the background of ${tile.background}` : erased ? "without the marked tenth" : plain.name;
    stage.element.classList.toggle("changed", Boolean(tile || erased));
    scale.replaceChildren(...(shown === "" && best ? scaleOf(best, `${best.method}, the best of ${map.maps.length} maps here: without its highest tenth ${percent(map.probability)} → ${percent(best.after)}`) : []));
    const [lead] = plain.answers;
    const name = firstName(plain.answers.find(({ class: index }) => index === plain.predicted)?.name ?? lead.name);
    sentence.replaceChildren("The model says ", h("b", {}, name), `, ${percent(lead.probability)}. `, looksAt());
    if (plain.truth && plain.truth !== lead.name) sentence.append(h("span", { class: "wrong" }, ` The data says ${firstName(plain.truth)}.`));
    whole.title.textContent = tile ? "Prediction on this background" : erased ? "Prediction without the marked tenth" : "Prediction";
    whole.show(tile?.answers ?? erased?.answers ?? plain.answers, mine().target ?? plain.predicted);
    act.textContent = moved?.missing ? "Hide what the map marks" : shown === "" ? "Change the background" : "Another background";
    act.hidden = Boolean(erased);
    back.hidden = shown === "";
    then.textContent = tile ? background(tile) : erased ? hidden(erased) : "";
  }

  // How far it moves without the background, beside how far without the object.
  function looksAt() {
    const share = moved?.dependence;
    if (share === null || share === undefined) return moved?.missing && map ? "The map marks what matters most." : "";
    const where = share > 0.5 ? "It looks at the background" : share > 0.2 ? "It looks at the object and the background" : "It looks at the object";
    const { good, changed } = others();
    const counted = changed ? `: on ${changed} of ${good} other backgrounds it says something else` : good ? `, and says the same on ${good} other backgrounds` : "";
    return h("span", { title: `Dependence on background ${percent(share)}: BIG / (FIG + BIG), how far the prediction moves without the background, of how far it moves without background or object` }, `${where}${counted}.`);
  }

  // Backgrounds that say something, and those of them that change the prediction.
  function others() {
    const name = moved.plain.find(({ leads }) => leads).name;
    const good = moved.tiles.filter(({ bad }) => !bad);
    return { name, good: good.length, changed: good.filter(({ answer }) => answer !== name).length };
  }

  function background({ answer, answers }) {
    const { probability } = answers.find(({ leads }) => leads);
    const now = answer === others().name ? "It still says" : "Now it says";
    return `${now} ${firstName(answer)}, ${percent(probability)}. The same ${moved.named ? firstName(moved.truth) : "object"}, another background.`;
  }

  function hidden({ answers }) {
    const now = answers.find(({ leads }) => leads);
    const same = now.class === plain.predicted;
    return `${same ? "It still says" : "Now it says"} ${firstName(now.name)}, ${percent(now.probability)}.`;
  }

  const brushing = latest(async () => {
    const request = brushed();
    const many = request.patches.length;
    brushCards.hidden = !many;
    const answer = many ? await job.watch((progress) => tools.ask("brush", request, { slot: "brush", progress })) : null;
    for (const [card, bars] of [[only, answer?.only], [without, answer?.without]]) {
      if (bars) card.show(bars, request.target ?? answer.predicted);
      else card.clear();
      card.say(bars ? `${answer.patches} of ${stage.rows * stage.columns} patches` : "no answer");
    }
    if (answer) {
      const lead = (bars) => { const { name, probability } = bars.find(({ leads }) => leads); return `${firstName(name)} ${percent(probability)}`; };
      tools.say(`${answer.patches} patches brushed. Only these: ${lead(answer.only)}. Without these: ${lead(answer.without)}.`);
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

  const when = whenChanged();
  function update(state) {
    const { layers, classes: names } = tools.model();
    const { target, ...settings } = mine();
    if (target !== null && target >= names.length) state.explain.target = null;
    classes.set(names, mine().target);
    blank.value = settings.blank;
    tail.value = settings.tail;
    first.hidden = last.hidden = tail.closest(".field").hidden = layers === undefined;
    first.set(settings.first, (layers ?? 1) - 1);
    last.set(settings.last ?? layers, layers);
    last.input.disabled = ["", "source"].includes(settings.tail);
    for (const name of ["one", "other"]) stage.setPatches(name, settings[name]);
    stage.setPatches("brush", settings.patches, { fill: true });
    stage.setPatches("brush-line", settings.patches);
    buttons.choose(settings.tool);
    stage.setPainting(settings.tool !== "wipe");
    stage.element.classList.toggle("unwiped", settings.tool !== "wipe" || settings.shown !== "");
    clear.hidden = !settings.patches.length && !settings.one.length;
    invert.hidden = !settings.patches.length;
    when("look", on(), look);
    when("map", common(), mapping);
    when("moved", on(), moving);
    when("brush", brushed(), brushing);
    when("pair", { ...regions(), tool: settings.tool }, pairing);
    copying.update();
    draw();
  }

  return { update };
}

function pairWords({ label, one, other, joint, interaction }) {
  const verdict = Math.abs(interaction) < 0.05 * Math.max(Math.abs(joint), 0.1) ? "No interaction: effects add"
    : interaction > 0 ? "They need each other" : "Each does without the other";
  const number = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`;
  return h("p", {}, h("b", {}, verdict), `. For ${firstName(label)}, in logits: first region `, number(one), ", second ", number(other),
    ", both ", number(joint), ", interaction ", h("b", { class: "interaction" }, number(interaction)), ".");
}

export const panel = { defaults, perImage, mount };
