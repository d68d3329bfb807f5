// Parts: colours are parts of the picture; parts are switched off by their boxes or in the picture,
// and the prediction follows.

import { latest } from "./api.js";
import { PatchPicture } from "./grid.js";
import { Answers, Jobs, copyButtons, h, toggled, whenChanged } from "./parts.js";

const defaults = { out: [] };

function mount(root, tools) {
  const mine = () => tools.state().parts;
  const request = () => ({ model: tools.state().model, picture: tools.state().image, out: mine().out });

  let answer = null;

  const job = new Jobs();
  const picture = new PatchPicture({ label: "The image in the colours of its parts. Space switches the part of a patch.", caption: "its parts", onpaint: paint, onhover: hover });
  const seen = new PatchPicture({ label: "What the prediction is read from", caption: "what the prediction is read from" });
  const read = h("output", { class: "hover-read" });
  const boxes = h("fieldset", { class: "part-boxes" });
  const before = new Answers("All parts", "as the network is");
  const after = new Answers("As set", "untick a part, or click it in the image");
  const finding = h("p", { class: "finding", role: "status" });
  const note = h("p", { class: "small" });

  const copying = copyButtons(tools, () => tools.ask("copy", request()));
  root.append(h("div", { class: "layout" },
    h("aside", { class: "side", "aria-label": "Settings" }, boxes),
    h("div", { class: "work" },
      h("div", { class: "two-pictures" }, h("div", {}, picture.element, read), seen.element),
      job.error,
      h("div", { class: "stage-answers two" }, before.element, after.element),
      finding, copying, note)));

  const toggle = (part) => tools.set({ out: toggled(mine().out, part) });

  function paint([place], { first }) {
    const part = answer?.winner[place];
    if (first && part !== undefined && part < answer.parts.length) toggle(part);
  }

  function hover(place) {
    const part = place === null ? undefined : answer?.winner[place];
    read.textContent = part === undefined ? "" : part < answer.parts.length ? `part ${part}, votes for ${answer.parts[part].votes}` : "background: not read";
  }

  function build() {
    boxes.replaceChildren(h("legend", {}, "Parts that are read"), ...answer.parts.map(({ part, colour, patches, votes }) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = colour;
      const box = h("input", { type: "checkbox", onchange: () => toggle(part) });
      box.checked = !mine().out.includes(part);
      return h("label", {}, box, swatch, h("span", {}, `part ${part}`), h("small", {}, patches ? `${patches} patches, votes for ${votes}` : "not in this image"));
    }));
  }

  const looking = latest(async () => {
    const asked = request();
    const { out } = asked;
    answer = (await job.watch((progress) => tools.ask("look", asked, { slot: "parts", progress }))) ?? null;
    if (!answer) {
      for (const card of [before, after]) card.clear();
      for (const part of [picture, seen]) part.clear();
      finding.textContent = "";
      after.say("no answer");
      return;
    }
    picture.setPicture(answer.picture, answer.grid, answer.size);
    picture.setPatches("gone", answer.winner.flatMap((part, place) => (out.includes(part) ? [place] : [])));
    seen.setPicture(answer.seen, answer.grid, answer.size);
    before.show(answer.before);
    after.show(answer.after);
    after.say(out.length ? `${out.length} ${out.length === 1 ? "part" : "parts"} out` : "untick a part, or click it in the image");
    finding.textContent = answer.empty ? "Nothing is read: this prediction says nothing about the image." : `The prediction is read from ${Math.round(100 * answer.share)} % of the patches.`;
    finding.dataset.share = answer.share.toFixed(4);
    note.textContent = answer.note;
    if (!boxes.contains(document.activeElement)) build();
    else for (const [place, box] of [...boxes.querySelectorAll("input")].entries()) box.checked = !mine().out.includes(place);
  });

  const when = whenChanged();
  function update() {
    copying.update();
    when("look", request(), looking);
  }

  return { update };
}

export const panel = { defaults, mount };
