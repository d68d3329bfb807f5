// Audit and repair: objects on other pictures' backgrounds, answers that flip, a remedy, and the
// checkpoint. Nothing long runs by itself: a link restores the settings, a button runs them.

import { JobBar, barRow, copyButtons, field, h, saveFile, select, uid } from "./parts.js";

const VERDICTS = {
  yes: "Yes, it answers from the background.", no: "No, its answers hardly follow the background.",
  "cannot tell": "It cannot be told from these pictures.",
  "too few": "Too few right answers to tell.",
};
const defaults = { data: "", masks: "data", limit: 64, learn: "", remedy: "last-layer", force: false };
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`);
const points = (value) => (100 * value).toFixed(0).replace("-", "−");

function mount(root, tools) {
  const sets = tools.hello.data;
  if (!sets.length) {
    root.append(h("p", { class: "notice" }, "There are no pictures to audit. Start the server with some: ", h("code", {}, "seecause serve --model NAME --data folder:PATH"), " (a folder for each class; masks in PATH/masks)."));
    return { update() {} };
  }
  const mine = () => tools.state().repair;
  const onData = () => ({ model: tools.state().model, data: known(mine().data, sets[0]), masks: mine().masks, limit: mine().limit });
  const request = () => ({ ...onData(), learn: known(mine().learn, sets.find((name) => name !== onData().data) ?? sets[0]), remedy: mine().remedy, force: mine().force });
  const known = (name, other) => (sets.includes(name) ? name : other);

  const audits = new Map(); // answers by their request: going back shows them again
  const repairs = new Map();
  let remedies = [];
  let shown = {}; // what is on the page: drawn again only where it changes

  const named = sets.map((name) => [name, name]);
  const data = select(named, { onchange: (value) => tools.set({ data: value }) });
  const maskSource = select([], { onchange: (value) => tools.set({ masks: value }) });
  const limit = h("input", { type: "number", min: "8", max: "512", step: "8", onchange: () => tools.set({ limit: Math.min(512, Math.max(8, Math.round(+limit.value) || 64)) }) });
  const start = h("button", { type: "button", class: "go", onclick: auditing }, "Audit");
  const job = new JobBar();
  const result = h("div", { class: "audit-result", hidden: true });

  const learn = select(named, { onchange: (value) => tools.set({ learn: value }) });
  const remedy = select([], { onchange: (value) => tools.set({ remedy: value }) });
  const summary = h("p", { class: "small" });
  const force = h("input", { type: "checkbox", onchange: () => tools.set({ force: force.checked }) });
  const attempt = h("button", { type: "button", class: "go", onclick: runRepair }, "Try it");
  const repairJob = new JobBar();
  const outcome = h("div", { class: "repair-result", hidden: true });
  const heading = uid("repair");
  const repairPart = h("section", { class: "repair", hidden: true, "aria-labelledby": heading },
    h("h2", { id: heading }, "Can it be repaired?"),
    h("div", { class: "repair-settings" }, field("remedy", remedy), field("learns from", learn),
      h("label", { class: "tick" }, force, "take it even if it is not better"), attempt),
    summary, repairJob.error, repairJob.element, outcome);

  root.append(h("div", { class: "layout" },
    h("aside", { class: "side", "aria-label": "Settings" }, field("pictures", data), field("objects are found by", maskSource), field("how many pictures, at most", limit), start),
    h("div", { class: "work" }, job.error, job.element, result, repairPart, copyButtons(() => tools.ask("copy", request())))));

  async function auditing() {
    const text = JSON.stringify(onData());
    start.disabled = true;
    const answer = await job.watch((progress) => tools.ask("audit", onData(), { slot: "audit", progress }));
    start.disabled = false;
    if (answer) audits.set(text, answer);
    if (answer) tools.say(VERDICTS[answer.verdict]);
    update();
  }

  async function runRepair() {
    const text = JSON.stringify(request());
    attempt.disabled = true;
    const answer = await repairJob.watch((progress) => tools.ask("run_repair", request(), { slot: "repair", progress }));
    attempt.disabled = false;
    if (answer) repairs.set(text, answer);
    if (answer) tools.say(answer.sentence);
    update();
  }

  async function exporting(saved) {
    const answer = await repairJob.watch((progress) => tools.ask("export", request(), { slot: "export", progress }));
    if (!answer) return;
    saved.textContent = `${await saveFile(answer)}: the checkpoint, its card and a page; sc.load opens the unpacked folder.`;
  }

  function showAudit(answer) {
    result.hidden = false;
    if (!answer) {
      result.replaceChildren(h("p", { class: "small" }, "Every object is put on backgrounds of other pictures. Answers that change are counted, beside those that change on backgrounds of pictures with the same answer: what cutting alone does. Press Audit."));
      return;
    }
    result.replaceChildren(
      h("h2", { class: "verdict", "data-verdict": answer.verdict }, VERDICTS[answer.verdict]),
      flips(answer),
      leftOut(answer.skipped),
      details("What this says", h("ul", {}, answer.words.slice(1).map((line) => h("li", {}, line)))),
      details("All numbers", table(["on these pictures", ""], answer.rows.map(({ name, value, meaning }) => [name, meaning, figure(name, value)]))),
      ...sheet("Where does it happen?", "Right answers that another background changes most.", answer.worst),
      ...sheet("How were they cut?", "Objects on backgrounds of pictures that are answered otherwise, from all pictures. Where a cut is bad, the numbers mean little.", answer.sheet));
  }

  function showRepair(answer) {
    outcome.hidden = !answer;
    if (!answer) return;
    const saved = h("span", { class: "small", role: "status" });
    const [learned, chose, reported] = answer.counts;
    const after = answer.taken || answer.remedy === "nothing" ? "after" : `with ${answer.remedy}`;
    outcome.replaceChildren(
      h("p", { class: "finding", "data-taken": String(answer.taken) }, answer.sentence),
      h("p", { class: "small" }, `${answer.done} ${learned} pictures to learn from, ${chose} to choose by, ${reported} that neither has seen:`),
      answer.failed ? "" : table(["on held-out pictures", "before", after], answer.rows.map(({ name, value, after: then, meaning }) => [name, meaning, figure(name, value), figure(name, then)])),
      ...answer.notes.map((note) => h("p", { class: "small" }, note)),
      leftOut(answer.skipped),
      answer.taken ? h("div", { class: "buttons export" }, h("button", { type: "button", onclick: () => exporting(saved) }, "Download the checkpoint"), saved) : "",
      ...sheet(answer.taken ? "The same pictures, before and after" : "Held-out pictures that flip most", "", answer.worst));
  }

  function update() {
    const { key } = tools.model();
    const sources = tools.hello.models.filter((model) => model.kind === "classifier" && model.layers !== undefined && model.key !== key);
    maskSource.replaceChildren(...[["data", "masks (or pairs) of the data"], ...sources.map((model) => [model.key, `maps of ${model.key}`]), ["own", "its own maps (not to be trusted)"]].map(([value, words]) => h("option", { value }, words)));
    if (![...maskSource.options].some((option) => option.value === mine().masks)) mine().masks = "data";
    data.value = onData().data;
    maskSource.value = mine().masks;
    limit.value = mine().limit;
    learn.value = request().learn;
    force.checked = mine().force;
    const answer = audits.get(JSON.stringify(onData()));
    if (!("audit" in shown) || shown.audit !== answer) showAudit(answer);
    remedies = answer?.remedies ?? [];
    repairPart.hidden = !answer || !remedies.length;
    remedy.replaceChildren(...remedies.map(({ name }) => h("option", { value: name }, name === "nothing" ? "do nothing" : name)));
    if (remedies.length && !remedies.some(({ name }) => name === mine().remedy)) mine().remedy = remedies[0].name;
    remedy.value = mine().remedy;
    const chosen = remedies.find(({ name }) => name === mine().remedy);
    summary.textContent = chosen ? `${chosen.summary} Cost: ${chosen.cost}.` : "";
    const done = repairs.get(JSON.stringify(request()));
    if (shown.repair !== done) showRepair(done);
    shown = { audit: answer, repair: done };
  }

  return { update };
}

// Pictures that could not be read: how many, which and why.
function leftOut(holes) {
  if (!holes.length) return "";
  const words = holes.length === 1 ? "1 picture could not be read and is left out" : `${holes.length} pictures could not be read and are left out`;
  return h("div", { class: "notice", "data-left-out": String(holes.length) }, details(words, h("ul", {}, holes.map(({ name, reason }) => h("li", {}, h("code", {}, name), ` ${reason}`)))));
}

// Flips as two bars; the interval is of their difference.
function flips({ flips: moved, control, extra, interval, right, pictures, from }) {
  const row = (name, value, css) => barRow(name, percent(value), value ?? 0, css);
  const words = interval
    ? `${points(extra)} points more than by cutting alone, 95 % interval ${points(interval[0])} to ${points(interval[1])}; “yes” where that begins above ${points(from)}.`
    : "";
  const card = h("section", { class: "answer-card flips" }, h("h3", {}, "Right answers that change"),
    h("ol", { class: "answers" }, row("on the background of a picture answered otherwise", moved, "explained"), row("of one answered the same (control)", control, "")),
    h("p", { class: "small" }, `${right} of ${pictures} pictures are answered right. ${words}`));
  card.dataset.flips = moved;
  card.dataset.control = control;
  if (interval) card.dataset.interval = interval.join(" ");
  return card;
}

function sheet(title, note, tiles) {
  if (!tiles.length) return [];
  return [h("h2", {}, title), note ? h("p", { class: "small" }, note) : "", h("div", { class: "tile-strip" }, tiles.map(tile))];
}

// Where the object is from, whose background it gets, the transplant; and the answers to the first and the last.
function tile({ picture, object, background, moved, truth, donor, answers }) {
  const image = (source, alt, words) => h("figure", {}, h("img", { src: source, alt }), h("figcaption", {}, words));
  const word = ({ name, right }) => h("b", { class: right ? "right" : "wrong" }, `${name} ${right ? "✓" : "✗"}`);
  const when = answers.length > 1 ? ["before: ", "after: "] : [""];
  return h("article", { class: "tile", title: picture },
    h("div", { class: "tile-pictures" }, image(object, `a ${truth}`, truth), background ? image(background, `a picture of ${donor}`, `on ${donor}’s`) : "", image(moved, `the ${truth} there`, "together")),
    answers.map(([plain, there], place) => h("p", {}, when[place], word(plain), " → ", word(there))));
}

const figure = (name, value) => (name === "compared images" ? value.toFixed(0) : value.toFixed(3));

function table(head, rows) {
  return h("div", { class: "scroll" }, h("table", { class: "figures" }, h("thead", {}, h("tr", {}, head.map((words) => h("th", { scope: "col" }, words)))),
    h("tbody", {}, rows.map(([name, meaning, ...cells]) => h("tr", { "data-row": name }, h("th", { scope: "row" }, name, h("small", {}, meaning)), cells.map((cell) => h("td", {}, cell)))))));
}

const details = (title, body) => h("details", { class: "settings" }, h("summary", {}, title), body);

export const panel = { defaults, mount };
