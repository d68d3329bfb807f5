// Test: this object on eight backgrounds, live; then the audit of a dataset, whose result the server
// keeps under an id that the link names. Nothing long runs by itself.

import { latest, uploadData } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Jobs, barRow, details, field, firstName, h, inGrid, nextStep, percent, same, segmented, select, stroked, toggled, uid, whenChanged } from "./parts.js";

// `brushed`: patches of the object, where the user changed its mask; `out`: transplants left out
const defaults = { brushed: [], tool: "look", out: [], data: "", masks: "data", limit: 64, result: "" };
const perImage = ["brushed", "tool", "out"];
const TOOLS = [["look", "Look"], ["brush", "Add to the object"], ["erase", "Remove"]];

// Sources of object masks for a model.
export function maskSources(tools) {
  const { key } = tools.model();
  const others = tools.hello.models.filter((model) => model.kind === "classifier" && model.layers !== undefined && model.key !== key);
  return [["data", "from the dataset"], ...others.map((model) => [model.key, `found by ${model.key}`]), ["own", "its own maps (not to be trusted)"]];
}

// The dataset that is audited: the one that was chosen, or the first.
export const auditedData = (tools) => (tools.hello.data.includes(tools.state().test.data) ? tools.state().test.data : tools.hello.data[0] ?? "");

function mount(root, tools) {
  const mine = () => tools.state().test;
  const on = () => ({ model: tools.state().model, picture: tools.state().image });
  const request = () => ({ ...on(), brushed: inGrid(mine().brushed, tools.model()), masks: mine().masks });
  const audited = () => ({ model: tools.state().model, data: auditedData(tools), masks: mine().masks, limit: mine().limit });

  let placed = null;
  let running = false; // an audit
  const job = new Jobs();
  const sentence = h("p", { class: "headline", role: "status" });
  const picture = new PatchPicture({ label: "The image and its object. While the brush is on, space adds patches to the object or removes them.", onpaint: paint });
  const tool = segmented("What the pointer does", TOOLS, (name) => tools.set({ tool: name, ...(name !== "look" && !mine().brushed.length ? { brushed: placed?.patches ?? [] } : {}) }));
  const reset = h("button", { type: "button", class: "plain", onclick: () => tools.set({ brushed: [], tool: "look" }) }, "Reset the object");
  const sources = select([], { onchange: (masks) => tools.set({ masks }) });
  const wall = h("div", { class: "wall" });

  const auditJob = new Jobs();
  const data = select([], { onchange: (value) => tools.set({ data: value, result: "" }) });
  const limit = h("input", { type: "number", min: "8", max: "512", step: "8", onchange: () => tools.set({ limit: Math.min(512, Math.max(8, Math.round(+limit.value) || 64)), result: "" }) });
  const start = h("button", { type: "button", class: "go", onclick: auditing }, "Audit the dataset");
  const zip = h("input", { type: "file", accept: ".zip,application/zip", class: "quiet", tabindex: "-1", "aria-label": "A ZIP with a dataset", onchange: give });
  const open = h("button", { type: "button", onclick: () => zip.click() }, "Give a ZIP");
  const given = h("p", { class: "small", role: "status" });
  const result = h("div", { class: "audit-result" });
  const heading = uid("audit");
  let ownData;

  root.append(
    sentence, job.error,
    h("div", { class: "first" },
      h("div", { class: "stage-picture" }, picture.element, h("div", { class: "toolbar" }, tool, reset), field("Object mask", sources)),
      wall),
    h("section", { class: "audit", "aria-labelledby": heading }, h("h2", { id: heading }, "A whole dataset"),
      h("div", { class: "fields" }, field("Dataset", data), field("Images, at most", limit), start),
      h("p", { class: "small" }, `A verdict needs at least ${tools.hello.enough} images that are predicted correctly.`),
      ownData = details("Use your own dataset", h("p", { class: "small" }, "One sub-folder for each class; object masks, if you have some, in a folder masks/ with the same names."), h("div", { class: "fields" }, open, zip), given),
      auditJob.error, result),
    nextStep(tools, "repair", "Next: repair the model"));

  async function give() {
    const answer = await auditJob.watch(() => uploadData(zip.files[0]));
    zip.value = "";
    if (!answer) return;
    await tools.refresh();
    given.textContent = `${answer.name}: ${answer.images} images of ${answer.classes.map(firstName).join(", ")}`;
    tools.set({ data: answer.name, result: "" });
  }

  function paint(places, how) {
    const brushed = stroked(mine().brushed, places, { ...how, erase: mine().tool === "erase" });
    if (brushed.length !== mine().brushed.length) tools.set({ brushed });
  }

  const look = latest(async () => {
    const asked = on();
    placed = null;
    draw();
    const seen = await job.watch((progress) => tools.ask("look", asked, { panel: "explain", slot: "look", progress }));
    if (!seen || !same(asked, on())) {
      picture.clear();
      return;
    }
    picture.setPicture(seen.picture, seen.grid, seen.size);
    picture.caption.textContent = seen.name;
  });

  const placing = latest(async () => {
    const asked = request();
    const next = await job.watch((progress) => tools.ask("place", asked, { slot: "place", progress }));
    if (!same(asked, request())) return;
    placed = next ?? null;
    draw();
  });

  function draw() {
    const shown = mine().brushed.length ? mine().brushed : placed?.patches ?? [];
    picture.setPatches("object", shown);
    wall.classList.toggle("missing", Boolean(placed?.missing));
    if (!placed || placed.missing) {
      sentence.textContent = placed ? "Where is the object? Brush it, or let another network find it." : "";
      const backgrounds = tools.hello.samples.filter(({ id }) => id !== on().picture).slice(0, 8);
      wall.replaceChildren(...backgrounds.map(() => h("div", { class: "place" }, h("span"), h("span"), h("small"))));
      return;
    }
    const counted = placed.tiles.map((tile, index) => ({ ...tile, index, out: Boolean(tile.bad) || mine().out.includes(index) }));
    const kept = counted.filter(({ out }) => !out);
    const right = kept.filter((tile) => tile.right).length;
    const lead = placed.plain.find(({ leads }) => leads);
    const plain = lead.name === placed.truth ? `${percent(lead.probability)} ${firstName(lead.name)}` : `${firstName(lead.name)}, though it is ${firstName(placed.truth)}`;
    sentence.replaceChildren("On its own background: ", h("b", {}, plain), ". On other backgrounds: ", h("b", { "data-right": String(right), "data-of": String(kept.length) }, `${right} of ${kept.length} right`), ".");
    wall.replaceChildren(...counted.map(({ picture: source, background, donor, answer, answers, right: good, bad, out, index }) => h("button", {
      type: "button", class: `cut ${out ? "out" : good ? "right" : "wrong"}`, "aria-pressed": String(!out), disabled: Boolean(bad), title: bad || `On the background of ${background} (${firstName(donor)}). Press to leave it ${out ? "in" : "out"}.`,
      onclick: () => tools.set({ out: toggled(mine().out, index) }),
    }, h("img", { src: source, alt: "" }), h("span", {}, h("b", {}, `${good ? "✓" : "✗"} ${firstName(answer)}`), ` ${percent(answers.find(({ leads }) => leads).probability)}`), h("small", {}, bad || (out ? "left out" : `background of ${firstName(donor)}`)))));
  }

  async function auditing() {
    const asked = audited();
    running = start.disabled = true;
    const answer = await auditJob.watch((progress) => tools.ask("audit", asked, { panel: "repair", slot: "audit", progress, named: (id) => tools.set({ result: id }) }));
    running = start.disabled = false;
    if (answer && same(asked, audited())) show(answer);
    if (answer) tools.say(answer.words[0]);
  }

  // A result that the link names, also one that is still computed.
  const showing = latest(async () => {
    const id = mine().result;
    if (!id) {
      show(null);
      return;
    }
    if (running) return; // here
    const kept = await auditJob.watch((progress) => tools.result(id, { progress }));
    if (mine().result !== id) return;
    show(kept?.answer ?? null);
    if (kept === null) auditJob.fail("The server no longer has this result: audit once more.");
  });

  function show(answer) {
    result.replaceChildren(...(answer ? auditParts(answer) : []));
  }

  const when = whenChanged();
  function update() {
    sources.replaceChildren(...maskSources(tools).map(([value, text]) => h("option", { value }, text)));
    if (![...sources.options].some(({ value }) => value === mine().masks)) mine().masks = "data";
    sources.value = mine().masks;
    data.replaceChildren(...tools.hello.data.map((name) => h("option", { value: name }, name)));
    data.value = auditedData(tools);
    const none = !tools.hello.data.length;
    start.disabled = running || none;
    data.closest(".field").hidden = none;
    limit.value = mine().limit;
    tool.choose(mine().tool);
    picture.setPainting(mine().tool !== "look");
    reset.hidden = !mine().brushed.length;
    when("no data", none, () => { ownData.open = none; });
    when("look", on(), look);
    when("place", request(), placing);
    when("result", mine().result, showing);
    draw();
  }

  return { update };
}

// What an audit found, in the library's words.
export function auditParts(answer) {
  return [
    h("h3", { class: "verdict", "data-verdict": answer.verdict }, answer.words[0]),
    flips(answer), leftOut(answer.skipped),
    details("What this says", h("ul", {}, answer.words.slice(1).map((line) => h("li", {}, line)))),
    details("All numbers", table(["on these images", ""], answer.rows.map(({ name, value, meaning }) => [name, meaning, figure(name, value)]))),
    ...sheet("Where does it happen?", "Correct predictions that other backgrounds change most.", answer.worst),
    details("How were the objects cut?", h("p", { class: "small" }, "Where a cut is bad, the numbers mean little."), h("div", { class: "tile-strip" }, answer.sheet.map(tile))),
  ];
}

// Images that could not be read: how many, which and why.
export function leftOut(skipped) {
  if (!skipped.length) return "";
  const words = skipped.length === 1 ? "1 image could not be read and is left out" : `${skipped.length} images could not be read and are left out`;
  return h("div", { class: "notice", "data-left-out": String(skipped.length) }, details(words, h("ul", {}, skipped.map(({ name, reason }) => h("li", {}, h("code", {}, name), ` ${reason}`)))));
}

// Flips as two bars; the interval is of their difference.
function flips({ flips: moved, control, extra, interval, right, pictures }) {
  const points = (value) => (100 * value).toFixed(0).replace("-", "−");
  const words = interval ? ` Difference ${points(extra)} points, 95 % interval ${points(interval[0])} to ${points(interval[1])}.` : "";
  const card = h("section", { class: "answer-card flips" }, h("h3", {}, "Correct predictions that change"),
    h("ol", { class: "answers" }, barRow("on the background of an image predicted otherwise", percent(moved), moved ?? 0, "explained"), barRow("changes caused by pasting itself", percent(control), control ?? 0)),
    h("p", { class: "small" }, `${right} of ${pictures} images are predicted correctly.${words}`));
  card.dataset.flips = moved;
  card.dataset.control = control;
  if (interval) card.dataset.interval = interval.join(" ");
  return card;
}

export function sheet(title, note, tiles) {
  if (!tiles.length) return [];
  return [h("h3", {}, title), note ? h("p", { class: "small" }, note) : "", h("div", { class: "tile-strip" }, tiles.map(tile))];
}

// The image, whose background it gets, the transplant; and the predictions for the first and the last.
function tile({ picture, object, background, moved, truth, donor, answers }) {
  const image = (source, alt, words) => h("figure", {}, h("img", { src: source, alt }), h("figcaption", {}, words));
  const word = ({ name, right }) => h("b", { class: right ? "right" : "wrong" }, `${firstName(name)} ${right ? "✓" : "✗"}`);
  const when = answers.length > 1 ? ["before: ", "after: "] : [""];
  return h("article", { class: "tile", title: picture },
    h("div", { class: "tile-pictures" }, image(object, `a ${firstName(truth)}`, firstName(truth)), background ? image(background, `an image of ${firstName(donor)}`, "background") : "", image(moved, `the ${firstName(truth)} there`, "together")),
    answers.map(([plain, there], place) => h("p", {}, when[place], word(plain), " → ", word(there))));
}

export const figure = (name, value) => (name === "compared images" ? value.toFixed(0) : value.toFixed(3));

export function table(head, rows) {
  return h("div", { class: "scroll" }, h("table", { class: "figures" }, h("thead", {}, h("tr", {}, head.map((words) => h("th", { scope: "col" }, words)))),
    h("tbody", {}, rows.map(([name, meaning, ...cells]) => h("tr", { "data-row": name }, h("th", { scope: "row" }, name, h("small", {}, meaning)), cells.map((cell) => (cell?.nodeType ? cell : h("td", {}, cell))))))));
}

export const panel = { defaults, perImage, mount };
