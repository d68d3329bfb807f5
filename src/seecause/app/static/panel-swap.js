// Swap: drag patches of A into B at some blocks, and watch both answers; find the shortest path.

import { latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Answers, Chooser, JobBar, copyButtons, h, inGrid, same, segmented, slider, stroked, whenChanged } from "./parts.js";

const defaults = { a: "s0", b: "s4", patches: [], down: 0, across: 0, first: 0, last: null, tool: "move" };
const TOOLS = [["brush", "Brush in A"], ["erase", "Erase"], ["move", "Drag into B"]];

function mount(root, tools) {
  const mine = () => tools.state().swap;
  const request = () => {
    const { a, b, patches, down, across, first, last } = mine();
    const most = tools.model().layers - 1;
    return { model: tools.state().model, a, b, patches: inGrid(patches, tools.model()), down, across, first: Math.min(first, most), last: last === null ? null : Math.min(last, most) };
  };

  const job = new JobBar();
  const sides = {
    a: side("a", "Picture A", "A: arrow keys move over patches, space brushes the patch that goes into B."),
    b: side("b", "Picture B", "B: arrow keys with shift move the patches that came from A."),
  };
  const buttons = segmented("What the pointer does in A", TOOLS, (tool) => tools.set({ tool }));
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ patches: [], down: 0, across: 0 }) }, "Clear");
  const back = h("button", { type: "button", class: "plain", onclick: () => tools.set({ down: 0, across: 0 }) }, "Put at its own place");
  const find = h("button", { type: "button", class: "plain", onclick: () => seek() }, "Where does B’s answer become A’s?");
  const layerWord = (layer) => `layer ${layer}`;
  const first = slider("first layer", { max: 11, value: 0, text: layerWord, oninput: (value) => tools.set({ first: value, last: mine().last === null ? null : Math.max(value, mine().last) }) });
  const last = slider("last layer", { max: 11, value: 11, text: layerWord, oninput: (value) => tools.set({ last: value, first: Math.min(value, mine().first) }) });
  const found = h("div", { class: "finding path", "aria-live": "polite" });
  const missing = h("p", { class: "notice", role: "alert", hidden: true }, "Swapping patches needs a transformer; this model has no blocks.");

  const work = h("div", {},
    h("div", { class: "toolbar" }, buttons, clear, back),
    h("div", { class: "two" }, sides.a.element, sides.b.element),
    h("div", { class: "two sliders" }, first, last),
    job.error, job.element,
    h("div", { class: "seek" }, find, found),
    copyButtons(() => tools.ask("copy", request())),
  );
  root.append(missing, work);

  function side(name, title, label) {
    const picture = new PatchPicture({ label, onpaint: name === "a" ? paintA : moveB });
    const plain = new Answers("As it is", "no patch exchanged");
    const swapped = new Answers(name === "a" ? "With B’s patches" : "With A’s patches", "drag a patch from A into B");
    const chooser = new Chooser(tools.hello, { label: title, pastes: name === "a", onchoose: (id) => tools.set({ [name]: id }) });
    const element = h("section", { class: "swap-side", "data-side": name }, h("h2", {}, title), chooser.element,
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
    const picture = mine()[name];
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
    sides.b.picture.setPatches("landing", answer?.places ?? [], { fill: true });
    sides.b.picture.setPatches("landing-line", answer?.places ?? []);
  });

  // A path is one of these pictures; layers and patches move when it is shown.
  const pair = () => [tools.state().model, mine().a, mine().b];
  async function seek() {
    const [asked, { last: stop }, of] = [request(), mine(), pair()];
    found.replaceChildren();
    const answer = await job.watch((progress) => tools.ask("path", asked, { slot: "path", progress }));
    if (!answer || !same(of, pair())) return;
    const use = (way) => tools.set({ patches: way.patches, first: way.first, last: stop, down: 0, across: 0 });
    found.replaceChildren(...pathWords(answer, use));
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
    missing.hidden = tools.model().layers !== undefined;
    work.hidden = !missing.hidden;
    if (work.hidden) return;
    const most = tools.model().layers - 1;
    first.set(mine().first, most);
    last.set(mine().last ?? most, most);
    when("pair", pair(), () => found.replaceChildren());
    for (const name of ["a", "b"]) {
      sides[name].chooser.choose(mine()[name]);
      const key = `${tools.state().model} ${mine()[name]}`;
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

function pathWords(answer, use) {
  const { best, from, to, blocks, steps } = answer;
  if (!best) return [h("p", {}, `No patches of A alone turn ${from} into ${to} at these blocks: what the class token has read by then decides.`)];
  const many = (count) => `${count} ${count === 1 ? "patch" : "patches"}`;
  const most = Math.max(...blocks.map((way) => way.count), 1);
  return [
    h("p", {}, "The shortest path from ", h("b", {}, from), " to ", h("b", {}, to), `: ${many(best.count)} of A, put in from layer ${best.first} on.`),
    h("div", { class: "path-grid" },
      h("table", { class: "path-table" }, h("caption", {}, "Fewest patches that do it, by the layer from which on they are put in"),
        h("tbody", {}, blocks.map((way) => h("tr", { class: way.first === best.first ? "best" : "" },
          h("th", { scope: "row" }, `layer ${way.first}`),
          h("td", {}, bar(way.exists ? way.count / most : 0)),
          h("td", { class: "count" }, way.exists ? String(way.count) : "not by patches"),
          h("td", {}, way.exists ? h("button", { type: "button", class: "plain", onclick: () => use(way) }, "Show") : null))))),
      h("figure", { class: "chart path-chart" }, h("figcaption", {}, `Patch by patch: logit of ${to} less that of ${from}`), line(steps.map((step) => step.contrast)))),
  ];
}

// Values as a line over their places, with the zero that has to be crossed.
function line(values) {
  const [width, height, left, low, high] = [360, 170, 46, Math.min(...values, 0), Math.max(...values, 0)];
  const x = (place) => left + ((width - left - 8) * place) / Math.max(values.length - 1, 1);
  const y = (value) => 10 + ((height - 36) * (high - value)) / (high - low || 1);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `from ${values[0].toFixed(1)} to ${values.at(-1).toFixed(1)} with ${values.length - 1} patches` });
  svg.append(
    draw("line", { class: "base", x1: left, x2: width - 8, y1: y(0), y2: y(0) }),
    draw("polyline", { class: "way", points: values.map((value, place) => `${x(place)},${y(value)}`).join(" ") }),
    ...values.map((value, place) => draw("circle", { class: value > 0 ? "dot over" : "dot", cx: x(place), cy: y(value), r: values.length > 24 ? 1.8 : 3.2 })),
    text("0", left - 6, y(0) + 4, "end"), text(values[0].toFixed(1).replace("-", "−"), left - 6, y(values[0]) + 4, "end"),
    text("no patch", left, height - 6, "start"), text(`${values.length - 1} patches`, width - 8, height - 6, "end"));
  return svg;
}

function draw(tag, properties) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  return element;
}

function text(words, x, y, anchor) {
  const element = draw("text", { x, y, "text-anchor": anchor });
  element.textContent = words;
  return element;
}

function bar(share) {
  const inner = h("span");
  inner.style.width = `${100 * share}%`;
  return h("span", { class: "track" }, inner);
}

export const panel = { defaults, mount };
