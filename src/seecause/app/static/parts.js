// Parts that panels share: elements, bars of answers, the chooser of pictures, jobs, copy buttons.

import { Cancelled, download, sample, upload } from "./api.js";

// h("p", {class: "note"}, "words", child): properties that begin with "on" are listeners.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Three digits, however large or small.
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const digits = size < 1e-3 || size >= 1e4 ? value.toExponential(1) : value.toPrecision(3);
  return size === 0 ? "0" : digits.replaceAll("-", "−");
}

// The colours of a map, what they stand for, and a note below.
export function scaleOf({ low, high, signed }, note = "") {
  const end = (text) => h("span", {}, text.replaceAll("-", "−"));
  return [end(low), h("span", { class: signed ? "ramp signed" : "ramp" }), end(high), note ? h("span", { class: "scale-note" }, note) : null].filter(Boolean);
}

let count = 0;
export const uid = (name) => `${name}-${(count += 1)}`;

// A class's first name: "springer" of "English springer, English springer spaniel".
export const firstName = (name) => String(name).split(",")[0];

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.01 ? 1 : 0)}\u00a0%`);

// A menu of classes that is searched by typing; `onchoose(index or null)`.
export function classPicker(onchoose) {
  const list = h("datalist", { id: uid("classes") });
  const input = h("input", { type: "text", list: list.id, placeholder: "top prediction", autocomplete: "off", spellcheck: "false" });
  const element = h("div", { class: "picker" }, field("Explain", input), list);
  let names = [];
  input.addEventListener("change", () => {
    const text = input.value.trim().toLowerCase();
    const index = names.findIndex((name) => name.toLowerCase() === text || firstName(name).toLowerCase() === text);
    input.setCustomValidity(text && index < 0 ? "No class has this name." : "");
    if (input.reportValidity()) onchoose(text ? index : null);
  });
  element.set = (classes, target) => {
    if (names !== classes) {
      names = classes;
      list.replaceChildren(...classes.map((name) => h("option", { value: name })));
    }
    if (document.activeElement !== input) input.value = target === null ? "" : classes[target] ?? "";
  };
  return element;
}

// Asks for the next step of the path.
export function nextStep(tools, panel, words) {
  return h("div", { class: "next" }, h("button", { type: "button", onclick: () => tools.go(panel) }, words, h("span", { "aria-hidden": "true" }, " →")));
}

export const details = (title, ...body) => h("details", { class: "settings" }, h("summary", {}, title), h("div", {}, ...body));

export function field(label, control, note = "") {
  control.id ||= uid("field");
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, note ? h("small", {}, note) : null);
}

export function select(options, { value = "", onchange, ...rest } = {}) {
  const element = h("select", { ...rest, onchange: () => onchange?.(element.value) });
  element.append(...options.map(([key, words]) => h("option", { value: key }, words)));
  element.value = value;
  return element;
}

// An arrow key on one of some buttons chooses the one after or before it.
export function chooseByArrow(event, buttons, keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }) {
  const step = keys[event.key];
  if (!step) return;
  event.preventDefault();
  const all = [...buttons];
  const next = all[(all.indexOf(event.currentTarget) + step + all.length) % all.length];
  next.focus();
  next.click();
}

// A row of buttons of which one is chosen; arrow keys move the choice.
export function segmented(label, options, onchoose) {
  const buttons = options.map(([key, words]) => h("button", {
    type: "button", role: "radio", "data-key": key, onclick: () => onchoose(key),
    onkeydown: (event) => chooseByArrow(event, buttons),
  }, words));
  const element = h("div", { class: "segmented", role: "radiogroup", "aria-label": label }, buttons);
  element.choose = (key) => {
    for (const button of buttons) {
      const chosen = button.dataset.key === key;
      button.setAttribute("aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  };
  return element;
}

export function slider(label, { min = 0, max, value, oninput, text = String }) {
  const shown = h("output", {}, text(value));
  const input = h("input", { type: "range", min: `${min}`, max: `${max}`, step: "1" });
  input.value = value;
  input.addEventListener("input", () => {
    shown.textContent = text(+input.value);
    input.setAttribute("aria-valuetext", text(+input.value));
    oninput(+input.value);
  });
  const part = field(label, input);
  part.classList.add("slider");
  part.append(shown);
  part.set = (next, most = max) => {
    const value = Math.min(next, most);
    input.max = most;
    input.value = value;
    shown.textContent = text(value);
    input.setAttribute("aria-valuetext", text(value));
  };
  part.input = input;
  return part;
}

export const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

// when(name, question, run) runs if the question is another than the last one of that name.
export function whenChanged() {
  const seen = {};
  return (name, question, run) => {
    const text = JSON.stringify(question);
    if (seen[name] === text) return;
    seen[name] = text;
    run();
  };
}

// Of places in a grid those that the model's own has: a link, or another model, may have had more.
export const inGrid = (places, { grid: [rows, columns] }) => places.filter((place) => place < rows * columns);

const inOrder = (numbers) => [...numbers].sort((x, y) => x - y);

// Numbers in order with one of them put in, or out if it was in.
export function toggled(numbers, number) {
  const all = new Set(numbers);
  if (!all.delete(number)) all.add(number);
  return inOrder(all);
}

// Patches in order after a stroke over some places; a key pressed on a brushed patch erases it.
export function stroked(patches, places, { first, key, erase = false }) {
  const all = new Set(patches);
  const erases = erase || (key && first && all.has(places[0]));
  for (const place of places) erases ? all.delete(place) : all.add(place);
  return inOrder(all);
}

// Saves a file that a job made; its name and size in words.
export async function saveFile({ file, bytes }) {
  const { name, blob } = await download(file);
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
  return `${name}, ${(bytes / 1e6).toFixed(1)} MB`;
}

// A named bar, `share` of its track long.
export function barRow(name, value, share, css = "") {
  const bar = h("span");
  bar.style.width = `${100 * share}%`;
  return h("li", { class: css }, h("span", { class: "name" }, name), h("span", { class: "value" }, value), h("span", { class: "track" }, bar));
}

// Classes as bars. Rows stay while their values move.
export class Answers {
  constructor(title, note = "") {
    this.list = h("ol", { class: "answers" });
    this.title = h("h2", {}, title);
    this.note = h("p", { class: "small" }, note);
    this.element = h("section", { class: "answer-card" }, this.title, this.note, this.list);
    this.rows = new Map();
  }

  say(words) {
    this.note.textContent = words;
  }

  show(answers, target = null) {
    const wanted = new Set(answers.map((answer) => answer.class));
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    for (const answer of answers) {
      let row = this.rows.get(answer.class);
      if (!row) {
        const bar = h("span");
        const value = h("span", { class: "value" });
        const name = h("span", { class: "name" });
        row = { name, bar, value, element: h("li", {}, name, value, h("span", { class: "track" }, bar)) };
        this.rows.set(answer.class, row);
      }
      row.name.textContent = firstName(answer.name); // another model has others at these places
      row.name.title = answer.name;
      row.value.textContent = answer.probability.toFixed(3);
      row.bar.style.width = `${100 * answer.probability}%`;
      row.element.classList.toggle("explained", answer.class === target);
      row.element.classList.toggle("leads", answer.leads);
      this.list.append(row.element);
    }
  }

  clear() {
    this.rows.clear();
    this.list.replaceChildren();
  }
}

// What the latest job says of itself, at the foot of the window, where it moves nothing.
const jobs = new Map(); // question -> how far it is
const progress = document.querySelector("#job");
const [progressWords, meter, stop] = progress.children;

function showProgress() {
  const latest = [...jobs.values()].at(-1);
  progress.hidden = !latest;
  if (!latest) return;
  const { state, share, words, left, cancel } = latest;
  const time = left === null || left === undefined ? "" : `, about ${left < 90 ? `${Math.ceil(left)} s` : `${Math.round(left / 60)} min`} left`;
  progressWords.textContent = (state === "waiting" ? "waiting" : words || "working") + time;
  if (share > 0) meter.value = share;
  else meter.removeAttribute("value");
  stop.onclick = () => {
    progressWords.textContent = "cancelling";
    cancel();
  };
}

// Watches the jobs of a part of a panel; `error` is where their errors are said.
export class Jobs {
  constructor() {
    this.error = h("p", { class: "notice", role: "alert", hidden: true });
  }

  fail(words) {
    this.error.textContent = words;
    this.error.hidden = false;
  }

  // Run a question; errors are said, a cancelled one gives undefined.
  async watch(run) {
    const question = Symbol("question");
    const told = (job) => {
      if (job.cancel) jobs.set(question, job);
      else jobs.delete(question);
      showProgress();
    };
    this.error.hidden = true;
    try {
      return await run(told);
    } catch (failure) {
      if (!(failure instanceof Cancelled)) this.fail(failure.message);
      return undefined;
    } finally {
      told({ cancel: null });
    }
  }
}

// The image tray: samples, and images of one's own by file; the page takes what is dropped or pasted.
export class Chooser {
  constructor(hello, { label = "Image", opens = true, onchoose }) {
    this.onchoose = onchoose;
    this.grid = h("div", { class: "thumbs", role: "radiogroup", "aria-label": label });
    this.input = h("input", { type: "file", accept: "image/*", class: "quiet", tabindex: "-1", "aria-label": `${label}: a file` });
    this.input.addEventListener("change", () => this.take(this.input.files[0]).catch(() => {}));
    this.button = h("button", { type: "button", onclick: () => this.input.click() }, "Open your image");
    this.error = h("p", { class: "notice", role: "alert", hidden: true });
    const hint = h("small", {}, "or drop or paste it anywhere");
    this.element = h("div", { class: "chooser" }, this.grid, opens ? h("div", { class: "open" }, this.button, hint, this.input) : null, this.error);
    this.limit = hello.upload_bytes;
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) this.fill(target);
    });
    for (const { id, name } of hello.samples) this.add({ id, name });
  }

  add({ id, name, thumb = null, first = Boolean(thumb) }) {
    if (this.grid.querySelector(`[data-id="${CSS.escape(id)}"]`)) return;
    const image = h("img", { alt: "" });
    const button = h("button", {
      type: "button", role: "radio", "aria-checked": "false", "aria-label": name, title: name, "data-id": id,
      onclick: () => this.onchoose(id), onkeydown: (event) => chooseByArrow(event, this.grid.children),
    }, image);
    if (first) this.grid.prepend(button);
    else this.grid.append(button);
    if (thumb) image.src = thumb;
    else this.seen.observe(button);
  }

  // An image's thumbnail, when it comes into sight; what cannot be read leaves the tray.
  fill(button) {
    this.seen.unobserve(button);
    sample(button.dataset.id).then((facts) => { button.firstChild.src = facts.thumb; button.title = facts.name; button.setAttribute("aria-label", facts.name); }, () => button.remove());
  }

  choose(id) {
    if (id.startsWith("u")) this.add({ id, name: "your image", first: true }); // of a link, or before a reload
    const known = [...this.grid.children];
    for (const button of known) {
      const chosen = button.dataset.id === id;
      button.setAttribute("aria-checked", String(chosen));
      if (chosen && !this.element.contains(document.activeElement)) this.reveal(button);
      button.tabIndex = chosen || (!known.some((other) => other.dataset.id === id) && button === known[0]) ? 0 : -1;
    }
  }

  // Scroll the strip, never the page.
  reveal(button) {
    const [box, strip] = [button.getBoundingClientRect(), this.grid.getBoundingClientRect()];
    if (box.right > strip.right || box.left < strip.left) this.grid.scrollLeft += box.left - strip.left - strip.width / 2;
    if (box.bottom > strip.bottom || box.top < strip.top) this.grid.scrollTop += box.top - strip.top - strip.height / 2;
  }

  async take(file) {
    this.error.hidden = true;
    if (!file) return;
    try {
      if (file.size > this.limit) throw new Error(`your image: more than ${this.limit >> 20} MB; save it smaller and try again.`);
      const facts = await upload(file);
      this.add(facts);
      this.onchoose(facts.id);
      this.grid.scrollLeft = 0;
    } catch (failure) {
      this.error.textContent = failure.message;
      this.error.hidden = false;
    }
    this.input.value = "";
  }
}

// "Copy as Python" and "Copy link": `script()` gives the lines of Python. A link to an image of one's
// own says that it is private before it is copied.
export function copyButtons(tools, script) {
  const shown = h("pre", { class: "copied", tabindex: "0", hidden: true, "aria-label": "what was copied" });
  const word = h("span", { class: "small", role: "status" });
  const python = h("button", {
    type: "button", class: "plain",
    onclick: async () => {
      try {
        const text = (await script()).python;
        shown.textContent = text;
        shown.hidden = false;
        await navigator.clipboard.writeText(text).then(
          () => { word.textContent = "copied"; },
          () => { word.textContent = "select and copy the text below"; },
        );
      } catch (failure) {
        word.textContent = failure.message;
      }
    },
  }, "Copy as Python");
  const link = h("button", {
    type: "button", class: "plain",
    onclick: () => navigator.clipboard.writeText(location.href).then(
      () => { word.textContent = "link copied"; },
      () => { word.textContent = "copy the address of this page"; },
    ),
  }, "Copy link");
  const element = h("div", { class: "copying" }, h("div", { class: "buttons" }, python, link, word), shown);
  element.update = () => {
    const own = tools.state().image.startsWith("u") && !tools.hello.share;
    link.textContent = own ? "Copy private link" : "Copy link";
    link.title = own ? "It names an image of yours, so it works in this browser only." : "";
    if (own !== element.own) word.textContent = own ? "The link names an image of yours: it works in this browser only." : "";
    element.own = own;
  };
  return element;
}
