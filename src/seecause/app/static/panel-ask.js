// Ask: a picture, a question, the answer. A click on a word shows the heads and image tokens behind
// it; a click on a head hides the image from it, and the model answers again.

import { latest } from "./api.js";
import { HeadButtons, PatchPicture } from "./grid.js";
import { Answers, Jobs, copyButtons, details, field, h, same, scaleOf, short, toggled, whenChanged } from "./parts.js";

const defaults = { question: "Which critter is this?", position: 0, blind: [] };
const LONGEST = 300; // letters of a question

function mount(root, tools) {
  const mine = () => tools.state().ask;
  const asked = () => ({ model: tools.state().model, picture: tools.state().image, question: mine().question.slice(0, LONGEST) });
  const word = () => ({ ...asked(), position: mine().position ?? 0 });
  const width = () => Math.max(...tools.model().heads);
  const request = () => ({ ...word(), blind: mine().blind.filter((place) => place < width() * tools.model().layers) });

  let answer = null;
  let traced = null;

  const job = new Jobs();
  const traceJob = new Jobs();
  const hearJob = new Jobs();
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
  const grid = new HeadButtons("hidden from", (place) => tools.set({ blind: toggled(mine().blind, place) }));
  const legend = h("p", { class: "small" });
  const clear = h("button", { type: "button", class: "plain", onclick: () => tools.set({ blind: [] }) }, "Reset");
  const enough = h("button", { type: "button", class: "plain", onclick: () => tools.set({ blind: traced.enough }) }, "Hide the image from key heads");
  const top = h("table", { class: "path-table top-heads" });
  const most = details("The heads that carry most", h("div", { class: "scroll" }, top));
  const heard = h("p", { class: "spoken", "aria-live": "polite" });
  const finding = h("p", { class: "finding" });
  const before = new Answers("All heads see the image", "the model as it is");
  const after = new Answers("Image hidden from some heads", "click heads in the grid");

  const copying = copyButtons(tools, () => tools.ask("copy", request()));
  root.append(h("div", { class: "layout" },
    h("aside", { class: "side", "aria-label": "Settings" }, field("Question", question), button, unknown),
    h("div", { class: "work" },
      h("h2", {}, "Answer"), spoken, job.error,
      h("div", { class: "heads-top" },
        h("section", { class: "heads-grid" }, h("div", { class: "toolbar" }, clear, enough), h("div", { class: "scroll" }, grid.element), legend),
        h("div", { class: "heads-picture" }, picture.element, scale, read, h("p", { class: "small" }, "A square is an image token, not a pixel: it also carries what the tower read around it."))),
      traceJob.error,
      h("h2", {}, "Answer with the image hidden from some heads"), heard, hearJob.error,
      h("div", { class: "stage-answers two" }, before.element, after.element),
      finding, most, copying)));

  function send() {
    const text = question.value.trim();
    if (text) tools.set({ question: text, position: 0 });
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

  function colour() {
    grid.colour(traced?.heads ?? null, mine().blind, { framed: traced?.enough, words: (layer, head) => ` ± ${short(traced.errors[layer][head])}` });
    clear.disabled = mine().blind.length === 0;
    enough.disabled = !traced;
    legend.textContent = traced ? `How much each head carries of the image’s effect on “${traced.word.trim()}” (${short(traced.span)} logits); R² on unseen masks ${traced.r2.toFixed(2)}. Framed: the ${traced.enough.length} key heads, which alone bring more than 80 %. The image is hidden from pressed heads: they attend to an average image.` : "";
  }

  function showTop() {
    const rows = traced ? traced.top.map(({ layer, head, value, error, words }) => h("tr", {},
      h("th", { scope: "row" }, `layer ${layer}, head ${head}`), h("td", { class: "count" }, `${short(value)} ± ${short(error)}`), h("td", {}, words.join(", ")))) : [];
    most.hidden = rows.length === 0;
    top.replaceChildren(h("caption", {}, "Value ± standard error, and the words that some write on their own"), h("tbody", {}, rows));
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
    answer = (await job.watch((progress) => tools.ask("answer", asked(), { slot: "answer", progress: (job) => { progress(job); if (job.words && job.cancel) spoken.replaceChildren(job.words); } }))) ?? null;
    if (!answer) {
      picture.clear();
      spoken.replaceChildren();
      unknown.textContent = "";
      return;
    }
    picture.setPicture(answer.picture, answer.grid, answer.size);
    picture.caption.textContent = answer.name;
    unknown.textContent = answer.unknown.length ? `The model does not know these words: ${answer.unknown.join(", ")}.` : "";
    words();
  });

  const tracing = latest(async () => {
    forget();
    const request = word();
    const next = await traceJob.watch((progress) => tools.ask("behind", request, { slot: "behind", progress }));
    if (!next || !same(request, word())) return;
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
    if (!next) {
      for (const card of [before, after]) card.clear();
      heard.textContent = finding.textContent = "";
      after.say("no answer");
      return;
    }
    heard.textContent = next.words.map((piece) => piece.trim()).join(" ") || "(no words)";
    before.show(next.before);
    after.show(next.after);
    after.say(next.blind ? `hidden from ${next.blind} ${next.blind === 1 ? "head" : "heads"}` : "click heads in the grid");
    finding.textContent = !next.blind ? "Bars: the most probable words at the position of the chosen one."
      : next.same ? "The same answer, though the image is hidden from these heads." : "Another answer, because the image is hidden from these heads.";
  });

  const when = whenChanged();
  function update() {
    copying.update();
    when("grid", tools.state().model, () => grid.build(tools.model()));
    when("question", mine().question, () => { question.value = mine().question; });
    when("answer", asked(), () => answering());
    when("word", word(), () => tracing());
    when("hear", request(), () => hearing());
    if (answer) words();
    colour();
  }

  return { update };
}

export const panel = { defaults, perImage: ["position"], mount };
