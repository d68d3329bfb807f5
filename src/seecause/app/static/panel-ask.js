// Ask: a picture, a question, the answer. A click on a word shows the heads and image tokens behind
// it; a click on a head blinds it, and the new answer is heard.

import { latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Answers, Chooser, JobBar, copyButtons, field, h, scaleOf, short } from "./parts.js";

const defaults = { picture: "s3", question: "Which critter is this?", position: 0, blind: [] };
const LONGEST = 300; // letters of a question

function mount(root, tools) {
  const mine = () => tools.state().ask;
  const asked = () => ({ model: tools.state().model, picture: mine().picture, question: mine().question.slice(0, LONGEST) });
  const word = () => ({ ...asked(), position: mine().position ?? 0 });
  const width = () => Math.max(...tools.model().heads);
  const request = () => ({ ...word(), blind: mine().blind.filter((place) => place < width() * tools.model().layers) });

  let answer = null;
  let traced = null;

  const job = new JobBar();
  const traceJob = new JobBar();
  const hearJob = new JobBar();
  const chooser = new Chooser(tools.hello, { onchoose: (picture) => tools.set({ picture, position: 0 }) });
  const question = h("textarea", { rows: "3", maxlength: String(LONGEST), onkeydown: (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    send();
  } });
  const button = h("button", { type: "button", onclick: () => send() }, "Ask");
  const unknown = h("p", { class: "small", role: "status" });
  const spoken = h("p", { class: "spoken", role: "group", "aria-label": "The answer. A word shows what is behind it." });
  const picture = new PatchPicture({ label: "Image tokens: what each brings to the word", onhover: hover });
  const read = h("output", { class: "hover-read" });
  const scale = h("div", { class: "scale" });
  const grid = h("table", { class: "head-buttons" });
  const legend = h("p", { class: "small" });
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ blind: [] }) }, "All see");
  const enough = h("button", { type: "button", class: "plain", onclick: () => tools.set({ blind: traced.enough }) }, "Blind those that are enough");
  const top = h("table", { class: "path-table top-heads" });
  const heard = h("p", { class: "spoken", "aria-live": "polite" });
  const finding = h("p", { class: "finding" });
  const before = new Answers("All heads see", "as the model is");
  const after = new Answers("Some blind", "click heads in the grid");

  root.append(h("div", { class: "layout" },
    h("aside", { class: "side", "aria-label": "Settings" }, chooser.element, field("question", question), button, unknown),
    h("div", { class: "work" },
      h("h2", {}, "Answer"), spoken, job.error, job.element,
      h("div", { class: "heads-top" },
        h("section", { class: "heads-grid" }, h("div", { class: "toolbar" }, clear, enough), h("div", { class: "scroll" }, grid), legend),
        h("div", { class: "heads-picture" }, picture.element, scale, read)),
      traceJob.error, traceJob.element, top,
      h("h2", {}, "Answer with blind heads"), heard, hearJob.error, hearJob.element,
      h("div", { class: "stage-answers two" }, before.element, after.element),
      finding, copyButtons(() => tools.ask("copy", request())))));

  function send() {
    const text = question.value.trim();
    if (text) tools.set({ question: text, position: 0 });
  }

  function toggle(place) {
    const blind = new Set(mine().blind);
    if (!blind.delete(place)) blind.add(place);
    tools.set({ blind: [...blind].sort((x, y) => x - y) });
  }

  function hover(place) {
    const value = place === null ? undefined : traced?.tokens.values[place];
    read.textContent = value === undefined ? "" : `${picture.where(place)}: ${short(value)} of the effect`;
  }

  function words() {
    spoken.replaceChildren(...answer.words.map((piece, place) => h("button", {
      type: "button", class: "word", "aria-pressed": String(place === mine().position), onclick: () => tools.set({ position: place }),
    }, piece.trim() || "·")));
  }

  function buildGrid() {
    const { layers, heads } = tools.model();
    const columns = Array.from({ length: width() }, (_, head) => head);
    grid.replaceChildren(
      h("caption", { class: "quiet" }, "Heads, layer by layer; a pressed button is a head that is blind"),
      h("thead", {}, h("tr", {}, h("td"), columns.map((head) => h("th", { scope: "col" }, String(head))))),
      h("tbody", {}, Array.from({ length: layers }, (_, layer) => h("tr", {}, h("th", { scope: "row" }, `layer ${layer}`),
        columns.map((head) => h("td", {}, head < heads[layer] ? headButton(layer * width() + head) : null))))));
  }

  function headButton(place) {
    return h("button", { type: "button", "data-place": String(place), onclick: () => toggle(place), onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width(), ArrowUp: -width() }[event.key];
      const next = step && grid.querySelector(`[data-place="${place + step}"]`);
      if (!next) return;
      event.preventDefault();
      next.focus();
    } });
  }

  function colour() {
    const blind = new Set(mine().blind);
    const many = new Set(traced?.enough);
    const reach = Math.max(...(traced ? traced.heads.flat().map(Math.abs) : []), 1e-12);
    for (const cell of grid.querySelectorAll("button")) {
      const place = +cell.dataset.place;
      const [layer, head] = [Math.floor(place / width()), place % width()];
      const value = traced?.heads[layer][head] ?? null;
      const words = value === null ? "" : `: ${short(value)} ± ${short(traced.errors[layer][head])}`;
      cell.className = `${value === null ? "none" : value >= 0 ? "for" : "against"}${many.has(place) ? " enough" : ""}`;
      cell.style.setProperty("--strength", `${value === null ? 0 : 100 * Math.min(1, Math.abs(value) / reach)}%`);
      cell.textContent = value === null ? "" : value.toFixed(3).replace("-", "−");
      cell.title = `layer ${layer}, head ${head}${words}`;
      cell.setAttribute("aria-pressed", String(blind.has(place)));
      cell.setAttribute("aria-label", `${cell.title}${blind.has(place) ? ", blind" : ""}`);
    }
    clear.disabled = blind.size === 0;
    enough.disabled = !traced;
    legend.textContent = traced ? `Each head's share of the picture's effect on “${traced.word.trim()}” (${short(traced.span)} logits), other heads seeing the picture or an average one by lot; R² on unseen masks ${traced.r2.toFixed(2)}. Framed: the ${traced.enough.length} that alone bring more than 80 %. Pressed heads are blind.` : "";
  }

  function showTop() {
    const rows = traced ? traced.top.map(({ layer, head, value, error, words }) => h("tr", {},
      h("th", { scope: "row" }, `layer ${layer}, head ${head}`), h("td", { class: "count" }, `${short(value)} ± ${short(error)}`), h("td", {}, words.join(", ")))) : [];
    top.hidden = rows.length === 0;
    top.replaceChildren(h("caption", {}, "The heads that bring most: value ± standard error, and what some would say on their own"), h("tbody", {}, rows));
  }

  function forget() {
    traced = null;
    picture.setHeat("");
    scale.replaceChildren();
    picture.stack.removeAttribute("data-sum");
    colour();
    showTop();
  }

  const answering = latest(async () => {
    const next = await job.watch((progress) => tools.ask("answer", asked(), { slot: "answer", progress }));
    if (!next) return;
    answer = next;
    picture.setPicture(answer.picture, answer.grid, answer.size);
    picture.caption.textContent = `${answer.name}`;
    unknown.textContent = answer.unknown.length ? `The model does not know these words: ${answer.unknown.join(", ")}.` : "";
    words();
  });

  const tracing = latest(async () => {
    forget();
    const next = await traceJob.watch((progress) => tools.ask("behind", word(), { slot: "behind", progress }));
    if (!next) return;
    traced = next;
    picture.setHeat(traced.tokens.layer);
    picture.stack.setAttribute("data-sum", traced.tokens.values.reduce((sum, value) => sum + (value ?? 0), 0).toFixed(4));
    scale.replaceChildren(...scaleOf(traced.tokens));
    read.textContent = `share of the effect; standard error ${short(traced.token_error)}, R² ${traced.token_r2.toFixed(2)}`;
    colour();
    showTop();
  });

  const hearing = latest(async () => {
    const next = await hearJob.watch((progress) => tools.ask("hear", request(), { slot: "hear", progress }));
    if (!next) return;
    heard.textContent = next.words.map((piece) => piece.trim()).join(" ") || "(it says nothing)";
    before.show(next.before);
    after.show(next.after);
    after.say(next.blind ? `${next.blind} ${next.blind === 1 ? "head" : "heads"} blind` : "click heads in the grid");
    finding.textContent = !next.blind ? "Bars: the likeliest words at the place of the chosen one."
      : next.same ? "The same answer, though these heads saw an average picture." : "Another answer: these heads saw an average picture.";
  });

  const seen = {};
  function update() {
    const when = (name, value, run) => {
      const text = JSON.stringify(value);
      if (seen[name] === text) return;
      seen[name] = text;
      run();
    };
    chooser.choose(mine().picture);
    when("grid", tools.state().model, buildGrid);
    when("question", mine().question, () => { question.value = mine().question; });
    when("answer", asked(), () => answering());
    when("word", word(), () => tracing());
    when("hear", request(), () => hearing());
    if (answer) words();
    colour();
  }

  return { update };
}

export const panel = { defaults, mount };
