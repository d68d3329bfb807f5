// Repair: remedies as cards with cost, gain and harm on held-out images; the repaired model is opened
// beside the old one, downloaded, or reported. Results stay on the server under ids that the link names.

import { Jobs, copyButtons, details, field, h, percent, saveFile, select, whenChanged } from "./parts.js";
import { auditedData, figure, leftOut, maskSources, sheet, table } from "./panel-test.js";

const defaults = { remedy: "last-layer", learn: "", force: false, results: "" };
// numbers of which more is better, and of which less is
const MORE = ["accuracy", "other accuracy", "transplant-worst", "worst group"];
const LESS = ["flips", "control flips", "extra flips", "BIR"];

function mount(root, tools) {
  const mine = () => tools.state().repair;
  const sets = () => tools.hello.data;
  const audited = () => ({ model: tools.state().model, data: auditedData(tools), masks: tools.state().test.masks, limit: tools.state().test.limit });
  const learn = () => (sets().includes(mine().learn) ? mine().learn : sets().find((name) => name !== audited().data && name.split(":")[0] === audited().data.split(":")[0]) ?? audited().data);
  const request = (remedy = mine().remedy) => ({ ...audited(), learn: learn(), remedy, force: mine().force });

  let remedies = [];
  let audit = null;
  const done = new Map(); // request -> reply
  const job = new Jobs();
  const sentence = h("p", { class: "headline", role: "status" });
  const cards = h("div", { class: "remedies", role: "radiogroup", "aria-label": "Remedies" });
  const learnt = select([], { onchange: (value) => tools.set({ learn: value }) });
  const data = select([], { onchange: (value) => { tools.state().test.data = value; tools.set({}); } });
  const masks = select([], { onchange: (value) => { tools.state().test.masks = value; tools.set({}); } });
  const force = h("input", { type: "checkbox", onchange: () => tools.set({ force: force.checked }) });
  const outcome = h("div", { class: "repair-result" });
  const copying = copyButtons(tools, () => tools.ask("copy", request()));
  const needs = h("p", { class: "notice", hidden: true }, "A repair needs a dataset: give one in the step Test. ", h("button", { type: "button", onclick: () => tools.go("test") }, "Go to Test"));
  const work = h("div", {}, cards, job.error,
    details("Advanced: data of the repair", h("div", { class: "fields" }, field("Learn from", learnt), field("Report on", data), field("Object masks", masks), h("label", { class: "tick" }, force, "Export even without improvement"))), outcome, copying);
  root.append(sentence, needs, work);

  async function attempt(remedy) {
    tools.set({ remedy });
    const asked = request(remedy);
    const answer = await job.watch((progress) => tools.ask("run_repair", asked, { slot: "repair", progress, named: (id) => {
      const ids = mine().results.split(",").filter((known) => known && known !== id);
      tools.set({ results: [...ids, id].slice(-6).join(",") });
    } }));
    if (!answer) return;
    done.set(JSON.stringify(asked), answer);
    tools.say(answer.sentence);
    draw();
  }

  // Results that the link names, after a reload or for somebody else.
  async function restore() {
    for (const id of mine().results.split(",").filter(Boolean)) {
      const kept = await job.watch((progress) => tools.result(id, { progress }));
      if (kept) done.set(JSON.stringify({ ...request(), ...kept.request }), kept.answer);
    }
    draw();
  }

  async function offer() {
    const asked = audited().model;
    const id = tools.state().test.result;
    const answer = await job.watch((progress) => tools.ask("offer", { model: asked }, { slot: "offer", progress }));
    if (!answer || asked !== audited().model) return;
    const kept = id ? await tools.result(id).catch(() => null) : null;
    audit = kept && kept.request.model === asked ? kept.answer : null;
    remedies = (audit?.remedies ?? answer.remedies).filter(({ name }) => name !== "nothing");
    draw();
  }

  async function act(name, use) {
    const answer = await job.watch((progress) => tools.ask(name, request(), { slot: name, progress }));
    if (answer) await use(answer);
  }

  async function open({ model }) {
    const before = tools.state().model;
    await tools.refresh();
    tools.go("test", { model });
    tools.say(`${model} is open beside ${before}; the model menu changes between them.`);
  }

  const of = (reply, name) => reply.rows.find((row) => row.name === name);
  const points = (row) => (row ? `${row.after >= row.value ? "+" : "−"}${Math.abs(100 * (row.after - row.value)).toFixed(0)} points` : "–");

  function card({ name, summary, cost }) {
    const reply = done.get(JSON.stringify(request(name)));
    const chosen = name === mine().remedy;
    const [gain, harm] = reply ? [of(reply, "other accuracy"), of(reply, "accuracy")] : [];
    const worse = (row) => (row && row.after < row.value - 1e-9 ? "worse" : "better");
    const facts = reply && !reply.failed ? [
      h("dt", {}, "Gain, other backgrounds"), h("dd", { class: worse(gain), "data-gain": gain ? String(gain.after - gain.value) : "" }, points(gain)),
      h("dt", {}, "Harm, plain images"), h("dd", { class: worse(harm), "data-harm": harm ? String(harm.after - harm.value) : "" }, points(harm)),
    ] : [];
    return h("article", { class: `remedy${chosen ? " chosen" : ""}`, "data-remedy": name, "data-taken": reply ? String(reply.taken) : null },
      h("h2", {}, name), h("p", {}, summary), h("dl", {}, h("dt", {}, "Cost"), h("dd", {}, reply ? `${reply.seconds} s` : cost), facts),
      h("div", { class: "buttons" }, reply ? h("button", { type: "button", "aria-pressed": String(chosen), onclick: () => tools.set({ remedy: name }) }, "Show") : h("button", { type: "button", class: chosen ? "go" : "", onclick: () => attempt(name) }, `Try ${name}`)));
  }

  // What a remedy did, in a sentence.
  function effect({ remedy, rows, failed, taken, done }) {
    const [other, plain] = ["other accuracy", "accuracy"].map((name) => rows.find((row) => row.name === name));
    if (failed || !other || !plain) return done;
    return `With ${remedy}, ${percent(other.after)} are right on other backgrounds (before: ${percent(other.value)}), and ${percent(plain.after)} on plain images (before: ${percent(plain.value)}).${taken ? "" : " Nothing was changed: this is not better."}`;
  }

  function draw() {
    const reply = done.get(JSON.stringify(request()));
    sentence.textContent = (reply && effect(reply)) ?? (audit ? audit.words[0] : "Choose a remedy: it learns from objects on other backgrounds and is judged on images that it has not seen.");
    sentence.dataset.taken = reply ? String(reply.taken) : "";
    cards.replaceChildren(...remedies.map(card));
    outcome.replaceChildren(...(reply ? parts(reply) : []));
  }

  function parts(reply) {
    const saved = h("span", { class: "small", role: "status" });
    const keep = async (file) => { saved.textContent = `${await saveFile(file)}; sc.load opens the unpacked folder.`; };
    const buttons = h("div", { class: "buttons" },
      reply.taken ? h("button", { type: "button", class: "go", onclick: () => act("open_repaired", open) }, "Open the repaired model here") : null,
      reply.taken ? h("button", { type: "button", onclick: () => act("export", keep) }, "Download the checkpoint") : null,
      h("button", { type: "button", onclick: () => act("report", async (file) => { saved.textContent = await saveFile(file); }) }, "Download the report"), saved);
    const [learned, chose, reported] = reply.counts;
    const better = (name, change) => (Math.abs(change) < 1e-9 ? "" : (MORE.includes(name) && change < 0) || (LESS.includes(name) && change > 0) ? "worse" : "");
    return [buttons,
      ...sheet(reply.taken ? "The same images, before and after" : "Held-out images that change most", "", reply.worst),
      details("All numbers", h("p", { class: "small" }, `${reply.sentence} ${reply.done} ${learned} images to learn from, ${chose} to choose by, ${reported} held out.`),
        reply.failed ? "" : table(["on held-out images", "before", "after"], reply.rows.map(({ name, value, after, meaning }) => [name, meaning, figure(name, value), h("td", { class: better(name, after - value) }, figure(name, after))]))),
      ...reply.notes.map((note) => h("p", { class: "small" }, note)), leftOut(reply.skipped)];
  }

  const when = whenChanged();
  function update() {
    needs.hidden = sets().length > 0;
    work.hidden = !needs.hidden;
    if (work.hidden) return;
    const options = (names) => names.map((name) => h("option", { value: name }, name));
    learnt.replaceChildren(...options(sets()));
    learnt.value = learn();
    data.replaceChildren(...options(sets()));
    data.value = audited().data;
    masks.replaceChildren(...maskSources(tools).map(([value, words]) => h("option", { value }, words)));
    masks.value = audited().masks;
    force.checked = mine().force;
    when("offer", [audited().model, tools.state().test.result], offer);
    when("results", [...done.keys()].length ? "here" : mine().results, restore);
    copying.update();
    draw();
  }

  return { update };
}

export const panel = { defaults, noImage: true, mount };
