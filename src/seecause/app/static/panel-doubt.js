// Doubt: up to four maps with what the model predicts without the tenth that each marks, beside
// random patches; and the fewest patches that keep or break the prediction.

import { latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Jobs, barRow, copyButtons, firstName, h, nextStep, percent, same, scaleOf, select, short, whenChanged } from "./parts.js";

const MOST = 4;
const defaults = { methods: "", evidence: false };

function mount(root, tools) {
  const mine = () => tools.state().doubt;
  const explain = () => tools.state().explain;
  const on = () => ({ model: tools.state().model, picture: tools.state().image, target: explain().target });
  const request = () => {
    const { blank, tail, first, last } = explain();
    const names = mine().methods.split(",").filter((name) => name in tools.model().methods);
    const layers = tools.model().layers ?? 0;
    const common = { ...on(), blank, tail: tail || null, first: Math.min(first, Math.max(layers - 1, 0)), last: last === null ? null : Math.min(last, layers) };
    return names.length ? { ...common, methods: names } : common;
  };

  let plain = null;
  let answer = null;
  const job = new Jobs();
  const sentence = h("p", { class: "headline", role: "status" });
  const ladder = h("ol", { class: "answers" });
  const strip = h("div", { class: "map-strip" });
  const more = select([], { "aria-label": "Add a map", onchange: (value) => {
    more.value = "";
    if (value) set([...names().slice(0, MOST - 1), value]);
  } });
  const find = h("button", { type: "button", "aria-pressed": "false", onclick: () => tools.set({ evidence: !mine().evidence }) }, "Find minimal evidence");
  const evidence = h("div", { class: "evidence", hidden: true });
  const [enough, needed] = ["enough", "needed"].map((name) => new PatchPicture({ label: `Image: ${name} patches` }));
  const words = [h("p", {}), h("p", {})];
  const evidenceJob = new Jobs();
  const ranking = h("p", { class: "small" });
  const copying = copyButtons(tools, () => tools.ask("copy", request()));
  evidence.append(...[enough, needed].map(({ element }, index) => h("div", {}, element, words[index])));
  root.append(sentence, job.error,
    h("section", { class: "answer-card ladder" }, h("h2", {}, "Probability after erasing a tenth of the image"), ladder, h("p", { class: "small" }, "The lower, the better the map shows what the model needs. Random is the mean of 20 draws.")),
    h("div", { class: "strip-head" }, h("h2", {}, "Maps"), more), strip,
    h("div", { class: "strip-head" }, h("h2", {}, "Minimal evidence"), find), evidenceJob.error, evidence, ranking,
    nextStep(tools, "test", "Next: test other backgrounds"), copying);

  const names = () => answer?.maps.map(({ method }) => method) ?? [];
  const set = (methods) => tools.set({ methods: [...new Set(methods)].join(",") });

  const look = latest(async () => {
    plain = null;
    draw();
    const asked = on();
    const seen = await job.watch((progress) => tools.ask("look", { model: asked.model, picture: asked.picture }, { panel: "explain", slot: "look", progress }));
    if (!seen || !same(asked, on())) return;
    plain = seen;
    for (const part of [enough, needed]) part.setPicture(seen.picture, seen.grid, seen.size);
    draw();
  });

  const comparing = latest(async () => {
    const asked = request();
    answer = null;
    draw();
    const next = await job.watch((progress) => tools.ask("compare", asked, { slot: "compare", progress }));
    if (!next || !same(asked, request())) return;
    answer = next;
    draw();
  });

  function draw() {
    for (const part of [ladder, strip]) part.classList.toggle("waiting", !answer || !plain);
    if (!answer || !plain) {
      sentence.textContent = "";
      return;
    }
    const { maps, best, probability, random } = answer;
    const label = firstName(maps[0].label);
    const winner = maps.find(({ method }) => method === best);
    const clear = winner.after < random.low;
    const size = (drop) => percent(Math.max(0, drop));
    sentence.replaceChildren(h("b", {}, best), clear ? ` predicts best what the model does here: without the tenth that it marks, ${label} falls from ${percent(probability)} to ${percent(winner.after)}; without a random tenth, to ${percent(random.after)}.`
      : ` is the best of these maps, and no better than a random tenth: ${label} falls by ${size(probability - winner.after)}, at random by up to ${size(probability - random.low)}. No single tenth decides here; test the background.`);
    const order = [...maps].sort((one, other) => one.after - other.after);
    const rows = [...order.map(({ method, after }) => [method, after, method === best ? "explained" : ""]), [`random (mean of ${random.draws})`, random.after, "random"]];
    ladder.replaceChildren(barRow("whole image", probability.toFixed(3), probability), ...rows.map(([name, value, css]) => barRow(name, value.toFixed(3), value, css)));
    strip.replaceChildren(...order.map(card));
    more.replaceChildren(h("option", { value: "" }, maps.length < MOST ? "add a map …" : "replace the last map …"), ...Object.entries(tools.model().methods).filter(([name]) => !names().includes(name)).map(([name, cost]) => h("option", { value: name }, `${name} (${cost} forwards)`)));
  }

  function card(drawn) {
    const { method, after, top, grid, layer, seconds, summary, classes, by_class: byClass, values } = drawn;
    const lines = h("div", { class: "patch-values" }, h("p", {}, "point at a patch: its value"));
    const picture = new PatchPicture({ label: `Map by ${method}. Arrow keys move over patches.`, onhover(place) {
      picture.setPatches("cursor", place === null ? [] : [place]);
      const rows = place === null ? [] : byClass.length ? byClass.map((row, index) => [firstName(classes[index]), row[place]]) : [[firstName(drawn.label), values[place]]];
      lines.replaceChildren(...(rows.length ? rows.map(([name, value]) => h("div", {}, h("span", {}, name), h("b", {}, short(value)))) : [h("p", {}, "point at a patch: its value")]));
    } });
    picture.setPicture(plain.picture, grid, plain.size);
    picture.setHeat(layer);
    if (grid[0] === plain.grid[0]) picture.setPatches("one", top);
    picture.caption.textContent = `${percent(after)} without the outline`;
    picture.stack.title = summary;
    const close = h("button", { type: "button", class: "close", "aria-label": `remove the map by ${method}`, disabled: names().length < 2, onclick: () => set(names().filter((name) => name !== method)) }, "×");
    return h("article", { class: `map-card${method === answer.best ? " best" : ""}`, "data-method": method, "data-after": String(after) },
      h("header", {}, h("h3", {}, method), h("span", { class: "small" }, method === answer.best ? "best here" : `${seconds.toFixed(2)} s`), close), picture.element, h("div", { class: "scale" }, scaleOf(drawn, drawn.remark)), lines);
  }

  const weighing = latest(async () => {
    evidence.hidden = !mine().evidence;
    evidence.classList.add("waiting");
    ranking.textContent = "";
    for (const part of [enough, needed]) for (const name of ["enough", "needed"]) part.setPatches(name, []);
    if (!mine().evidence) return;
    const asked = on();
    const found = await evidenceJob.watch((progress) => tools.ask("evidence", asked, { panel: "explain", slot: "evidence", progress }));
    if (!found || !mine().evidence || !same(asked, on())) return;
    evidence.classList.remove("waiting");
    const label = firstName(found.label);
    const share = (set) => percent(set.patches.length / found.of);
    enough.setPatches("enough", found.enough.patches);
    needed.setPatches("needed", found.needed.patches);
    const none = "The model does not predict this class, so no patches keep or break it.";
    words[0].textContent = !found.answered ? none : !found.enough.patches.length ? `A blank image alone gives “${label}”.`
      : `These ${share(found.enough)} alone still give “${label}” (${percent(found.enough.probability)}, was ${percent(found.probability)}).`;
    words[1].textContent = !found.answered ? "" : !found.needed.exists ? `No patch set flips it: “${label}” stays.`
      : `Hide these ${share(found.needed)} and it predicts “${firstName(found.needed.answer)}”.`;
    words[0].dataset.patches = found.enough.patches.length;
    words[1].dataset.patches = found.needed.patches.length;
    ranking.textContent = `Patches ranked by ${found.order}, as in the report and in sc.evidence; hidden areas have the mean colour.`;
  });

  const when = whenChanged();
  function update() {
    find.setAttribute("aria-pressed", String(mine().evidence));
    when("look", on(), look);
    when("compare", request(), comparing);
    when("evidence", mine().evidence && on(), weighing);
    copying.update();
  }

  return { update };
}

export const panel = { defaults, mount };
