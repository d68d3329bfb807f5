// Swap: drag patches of A into B at some blocks, and watch both answers; find the fewest patches that
// flip B.

import { latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Answers, Chooser, Jobs, copyButtons, firstName, h, inGrid, percent, same, segmented, slider, stroked, whenChanged } from "./parts.js";

const defaults = { b: "s4", patches: [], down: 0, across: 0, first: 0, last: null, tool: "move" };
const TOOLS = [["brush", "Brush in A"], ["erase", "Erase"], ["move", "Drag into B"]];

function mount(root, tools) {
  const mine = () => tools.state().swap;
  const request = () => {
    const { b, patches, down, across, first, last } = mine();
    const most = tools.model().layers - 1;
    return { model: tools.state().model, a: tools.state().image, b, patches: inGrid(patches, tools.model()), down, across, first: Math.min(first, most), last: last === null ? null : Math.min(last, most) };
  };

  const id = (name) => (name === "a" ? tools.state().image : mine().b);
  const job = new Jobs();
  const sides = {
    a: side("a", "Image A", "A: arrow keys move over patches, space brushes the patch that goes into B."),
    b: side("b", "Image B", "B: arrow keys with shift move the patches that came from A."),
  };
  const buttons = segmented("What the pointer does in A", TOOLS, (tool) => tools.set({ tool }));
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ patches: [], down: 0, across: 0 }) }, "Clear");
  const back = h("button", { type: "button", class: "plain", onclick: () => tools.set({ down: 0, across: 0 }) }, "Reset position");
  const find = h("button", { type: "button", class: "plain", onclick: () => seek() }, "Fewest patches of A that flip B");
  const layerWord = (layer) => `layer ${layer}`;
  const first = slider("First layer", { max: 11, value: 0, text: layerWord, oninput: (value) => tools.set({ first: value, last: mine().last === null ? null : Math.max(value, mine().last) }) });
  const last = slider("Last layer", { max: 11, value: 11, text: layerWord, oninput: (value) => tools.set({ last: value, first: Math.min(value, mine().first) }) });
  const found = h("div", { class: "finding found", "aria-live": "polite" });

  const copying = copyButtons(tools, () => tools.ask("copy", request()));
  const work = h("div", {},
    h("div", { class: "toolbar" }, buttons, clear, back),
    h("div", { class: "two" }, sides.a.element, sides.b.element),
    h("div", { class: "two sliders" }, first, last),
    job.error,
    h("div", { class: "seek" }, find, found),
    copying,
  );
  root.append(work);

  function side(name, title, label) {
    const picture = new PatchPicture({ label, onpaint: name === "a" ? paintA : moveB });
    const plain = new Answers("As it is", "no patch exchanged");
    const swapped = new Answers(name === "a" ? "With B’s patches" : "With A’s patches", "drag a patch from A into B");
    const chooser = name === "b" ? new Chooser(tools.hello, { label: title, opens: false, onchoose: (id) => tools.set({ b: id }) }) : null;
    const element = h("section", { class: "swap-side", "data-side": name }, h("h2", {}, title), chooser?.element,
      h("div", { class: "swap-stage" }, picture.element, h("div", { class: "swap-answers" }, plain.element, swapped.element)));
    return { element, picture, plain, swapped, chooser, look: "" };
  }

  // In A the pointer brushes, or takes the brushed region (or the patch below it) along.
  function paintA(places, { first: begins, key }) {
    const { tool, patches } = mine();
    if (tool === "move" && !key) {
      if (begins) take(places[0]);
      return;
    }
    const brushed = stroked(patches, places, { first: begins, key, erase: tool === "erase" });
    if (brushed.length !== patches.length) tools.set({ patches: brushed });
  }

  function take(place) {
    const { picture } = sides.a;
    if (!mine().patches.includes(place)) tools.set({ patches: [place], down: 0, across: 0 });
    const ghost = h("div", { class: "ghost" }, `${mine().patches.length} of A’s patches`);
    document.body.append(ghost);
    const follow = (event) => {
      Object.assign(ghost.style, { left: `${event.clientX + 12}px`, top: `${event.clientY + 12}px` });
      land(event, place);
    };
    const over = new AbortController(); // none of these may hear of the next drag
    const drop = (event) => {
      if (event.type === "pointerup") land(event, place);
      ghost.remove();
      over.abort();
    };
    const { signal } = over;
    picture.stack.addEventListener("pointermove", follow, { signal });
    for (const name of ["pointerup", "pointercancel"]) picture.stack.addEventListener(name, drop, { signal });
  }

  // The pointer is over B: the patch that was taken lands there, and the others around it.
  function land(event, from) {
    const { picture } = sides.b;
    const box = picture.stack.getBoundingClientRect();
    if (event.clientX < box.left || event.clientX > box.right || event.clientY < box.top || event.clientY > box.bottom) return;
    const [to, columns] = [picture.placeAt(event), picture.columns];
    const shift = { down: Math.floor(to / columns) - Math.floor(from / columns), across: (to % columns) - (from % columns) };
    if (shift.down !== mine().down || shift.across !== mine().across) tools.set(shift);
  }

  // In B a click, or shift with an arrow key, moves what has landed.
  let grip = null;
  function moveB(places, { first: begins, key }) {
    const { columns } = sides.b.picture;
    const place = places.at(-1);
    if (key && begins) return;
    if (key) grip = sides.b.picture.cursor ?? place;
    if (begins) {
      grip = place;
      return;
    }
    const down = mine().down + Math.floor(place / columns) - Math.floor(grip / columns);
    const across = mine().across + (place % columns) - (grip % columns);
    grip = place;
    tools.set({ down, across });
  }

  const looks = { a: latest(() => look("a")), b: latest(() => look("b")) };
  async function look(name) {
    const { model } = request();
    const picture = id(name);
    const answer = await job.watch((progress) => tools.ask("look", { model, picture }, { panel: "explain", slot: `look ${name}`, progress }));
    if (!answer) {
      sides[name].picture.clear();
      return;
    }
    sides[name].picture.setPicture(answer.picture, answer.grid, answer.size);
    sides[name].picture.caption.textContent = answer.name;
    marks();
  }

  const exchange = latest(async () => {
    const answer = await job.watch((progress) => tools.ask("exchange", request(), { slot: "exchange", progress }));
    for (const [name, other] of [["a", "b"], ["b", "a"]]) {
      const { plain, swapped } = sides[name];
      if (!answer) {
        plain.clear();
        swapped.clear();
        swapped.say("no answer");
        continue;
      }
      plain.show(answer[`plain_${name}`], answer[`predicted_${name}`]);
      swapped.show(answer[name], answer[`predicted_${other}`]);
      swapped.say(answer.patches ? `${answer.patches} patches exchanged` : "drag a patch from A into B");
    }
    sides.b.picture.paste(sides.a.picture, answer?.of ?? [], answer?.places ?? []);
    sides.b.picture.setPatches("landing", answer?.places ?? []);
  });

  const pair = () => [tools.state().model, id("a"), id("b")];
  async function seek() {
    const [asked, of] = [request(), pair()];
    found.replaceChildren();
    const answer = await job.watch((progress) => tools.ask("path", asked, { slot: "path", progress }));
    if (!answer || !same(of, pair())) return;
    const { patches, from, to, probability, order } = answer;
    found.replaceChildren(h("p", {}, h("b", { class: "count" }, String(patches.length)), ` of ${tools.model().grid.reduce((x, y) => x * y)} patches of A, put on B, turn “${firstName(from)}” into “${firstName(to)}” (${percent(probability)}); ranked by ${order}. `,
      h("button", { type: "button", class: "plain", onclick: () => tools.set({ patches, first: 0, last: 0, down: 0, across: 0 }) }, "Show")));
  }

  function marks() {
    const { patches, tool } = mine();
    sides.a.picture.setPatches("brush", patches, { fill: true });
    sides.a.picture.setPatches("brush-line", patches);
    buttons.choose(tool);
    sides.a.picture.stack.classList.toggle("grabbing", tool === "move");
  }

  const when = whenChanged();
  function update() {
    copying.update();
    const most = tools.model().layers - 1;
    first.set(mine().first, most);
    last.set(mine().last ?? most, most);
    when("pair", pair(), () => found.replaceChildren());
    for (const name of ["a", "b"]) {
      sides[name].chooser?.choose(id(name));
      const key = `${tools.state().model} ${id(name)}`;
      if (sides[name].look !== key) {
        sides[name].look = key;
        looks[name]();
      }
    }
    marks();
    when("exchange", request(), exchange);
  }

  return { update };
}

export const panel = { defaults, perImage: ["patches", "down", "across"], mount };
