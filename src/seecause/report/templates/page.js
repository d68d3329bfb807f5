"use strict";
// Opacity and smoothing are page-wide; the pointer is shared by all figures of a card, so maps can be compared patch by patch.
const root = document.documentElement;
const opacity = document.getElementById("opacity");
opacity.addEventListener("input", () => root.style.setProperty("--heat", opacity.value / 100));
root.style.setProperty("--heat", opacity.value / 100);
const controls = document.querySelector(".controls");
const smooth = document.getElementById("smooth");
const setSmooth = () => document.body.classList.toggle("patches", !smooth.checked);
smooth.addEventListener("change", setSmooth);
setSmooth();

// Maps are numbers, coloured here as `heat_layer` colours them.
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const COLOURS = { {% for name, table in colours.items() %}{{ name }}: bytes("{{ table }}"), {% endfor %} };
const SKIPPED = {{ skipped }}, TOGETHER = {{ together }};

function number(value) {
  const [digits, power] = value.toExponential(2).split("e");
  return power < -4 || power >= 3 ? `${+digits}e${+power}` : String(+value.toPrecision(3));
}

function paint(map) {
  const [low, high, signed, paleness] = map.dataset.ends.split(" ").map(Number);
  const table = signed ? COLOURS.RdBu_r : COLOURS.inferno;
  map.values = new Float32Array(bytes(map.dataset.values).buffer);
  const flat = high <= low, middle = signed ? 0.5 : 0;
  const unit = (value) => (flat ? middle : Math.min(1, Math.max(0, (value - low) / (high - low))));
  const units = map.dataset.pixels ? Float32Array.from(bytes(map.dataset.pixels), (value) => value / 255) : map.values.map(unit);
  const canvas = map.querySelector(".heat"), context = canvas.getContext("2d");
  const drawn = context.createImageData(canvas.width, canvas.height);
  units.forEach((share, place) => {
    const aside = 2 * share - 1, strength = signed ? Math.abs(aside) : share;
    const moved = signed ? share + SKIPPED * (1 - strength) * Math.sign(aside) : share;
    const colour = Math.min(255, Math.max(0, Math.floor(256 * moved)));
    drawn.data.set(table.subarray(3 * colour, 3 * colour + 3), 4 * place);
    drawn.data[4 * place + 3] = Math.round(255 * ((1 - paleness) * strength) ** 0.65);
  });
  context.putImageData(drawn, 0, 0);
  const bar = map.querySelector(".colours").getContext("2d"), row = bar.createImageData(256, 1);
  for (let place = 0; place < 256; place++) row.data.set([...table.subarray(3 * place, 3 * place + 3), 255], 4 * place);
  bar.putImageData(row, 0, 0);
}

function point(card, rows, columns, row, column) {
  for (const cursor of card.querySelectorAll(".cursor")) {
    Object.assign(cursor.style, {
      display: "block", left: `${100 * column / columns}%`, top: `${100 * row / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%`,
    });
  }
  for (const map of card.querySelectorAll(".map")) {
    const same = +map.dataset.rows === rows && +map.dataset.columns === columns;
    map.querySelector(".read").textContent = same ? `row ${row}, column ${column}: ${number(map.values[row * columns + column])}` : "";
  }
}

function leave(card) {
  for (const cursor of card.querySelectorAll(".cursor")) cursor.style.display = "none";
  for (const read of card.querySelectorAll(".read")) read.textContent = "";
}

function prepare(card) {
  const first = card.querySelector(".map");
  for (const map of card.querySelectorAll(".map")) paint(map);
  for (const stack of first ? card.querySelectorAll(".stack") : []) {
    const { rows, columns } = (stack.closest(".map") ?? first).dataset;
    stack.addEventListener("pointermove", (event) => {
      const box = stack.getBoundingClientRect();
      const within = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
      point(card, +rows, +columns, within((event.clientY - box.top) / box.height, +rows), within((event.clientX - box.left) / box.width, +columns));
    });
    stack.addEventListener("pointerleave", () => leave(card));
  }
  return card;
}

// Data stands in this page or in files beside it. These are scripts, because pages that are opened from a disk may not fetch.
const waiting = {}, loaded = {};
globalThis.seecause = { data: (name, value) => waiting[name](value) };
const load = (folder, name) => (loaded[name] ??= new Promise((resolve, reject) => {
  if (!folder) return resolve(JSON.parse(document.getElementById(`data-${name}`).textContent));
  waiting[name] = resolve;
  const script = document.createElement("script");
  script.src = `${folder}/${name}.js`;
  script.onerror = () => reject(new Error(`${script.src} is missing`));
  document.head.append(script);
}));

async function cardOf(folder, place) {
  const template = document.createElement("template"), name = String(Math.floor(place / TOGETHER)).padStart(4, "0");
  template.innerHTML = (await load(folder, name))[place % TOGETHER];
  return prepare(document.importNode(template.content.firstElementChild, true));
}

// Thumbnails: order, filter, page and open image are in the address after #, so that they can be sent and gone back from.
async function browsing(browse) {
  const { folder } = browse.dataset, { keys, rows } = await load(folder, "index");
  const items = rows.map((row) => Object.fromEntries(row.map((value, place) => [keys[place], value])));
  const form = browse.querySelector("form"), grid = browse.querySelector(".grid"), viewer = browse.querySelector("dialog");
  const { sort, show, find, count } = form.elements, classes = form.elements.class;
  const known = (key) => items.some((item) => (item[key] ?? "") !== "");
  items.forEach((item, place) => {
    item.place = place;
    if (item.answer) item.error = (item.answer === "wrong" ? 1 : -1) * item.confidence;
    item.words = `${item.title} ${item.class} ${item.truth}`.toLowerCase();
  });
  for (const option of [...sort.options]) if (option.value && !known(option.value.split(" ")[0])) option.remove();
  show.parentElement.hidden = !known("answer");
  const names = new Map();
  for (const item of items) if (item.class) names.set(item.class, (names.get(item.class) ?? 0) + 1);
  for (const [name, times] of [...names].sort()) classes.add(new Option(`${name} (${times})`, name));
  classes.parentElement.hidden = names.size < 2;

  let state = new URLSearchParams(), listed = [];
  const address = (changes) => {
    const next = new URLSearchParams(state);
    for (const [key, value] of Object.entries(changes)) value ? next.set(key, value) : next.delete(key);
    return `#${next.size ? next : "="}`;
  };
  const link = (anchor, changes) => (changes ? anchor.setAttribute("href", address(changes)) : anchor.removeAttribute("href"));

  function thumbnail(item) {
    const anchor = document.createElement("a"), image = new Image();
    const text = (name, words) => Object.assign(document.createElement(name ? "div" : "span"), { className: name, textContent: words });
    anchor.className = `thumb ${item.answer}`;
    link(anchor, { card: item.place + 1 });
    Object.assign(image, { loading: "lazy", decoding: "async", alt: "", src: item.photo });
    const predicted = text("class", ""), marks = { wrong: "✗ ", right: "✓ " };
    predicted.append(text("", `${marks[item.answer] ?? ""}${item.class}`), item.confidence ? (+item.confidence).toFixed(2) : "");
    anchor.append(image, predicted, text("title", item.title));
    if (item.answer === "wrong") anchor.title = `it is ${item.truth}`;
    return anchor;
  }

  function list() {
    const [key, direction] = (state.get("sort") ?? "").split(" ");
    const value = (item) => ((item[key] ?? "") === "" ? NaN : +item[key]);
    const words = (state.get("find") ?? "").trim().toLowerCase();
    const wanted = ["answer", "class"].map((name) => [name, state.get(name === "answer" ? "show" : name)]).filter(([, one]) => one);
    listed = items.filter((item) => wanted.every(([name, one]) => item[name] === one) && item.words.includes(words));
    if (key) listed.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return direction === "down" ? y - x : x - y;
    });
  }

  async function view() {
    const place = listed.findIndex((item) => item.place === state.get("card") - 1);
    if (place < 0) return viewer.open && viewer.close();
    for (const [name, next] of [["previous", place - 1], ["next", place + 1]]) link(viewer.querySelector(`.${name}`), listed[next] && { card: listed[next].place + 1 });
    viewer.querySelector(".place").textContent = `${place + 1} of ${listed.length}`;
    if (!viewer.open) {
      viewer.querySelector(".close").before(controls);  // of the maps
      viewer.showModal();
    }
    const shown = listed[place].place, element = await cardOf(folder, shown);
    if (shown === state.get("card") - 1) {
      const figures = element.querySelector(".strip")?.querySelectorAll("figure").length;
      viewer.style.setProperty("--columns", element.classList.contains("wide") ? 4 : figures ?? 3);
      viewer.querySelector(".viewer-card").replaceChildren(element);
      viewer.scrollTop = 0;
    }
  }

  let before = null;
  function update() {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) return;  // a section of the page
    state = new URLSearchParams(hash);
    for (const key of [...state.keys()]) if (!key || !state.get(key)) state.delete(key);
    for (const field of [sort, show, classes, find]) if (field !== document.activeElement || field !== find) field.value = state.get(field.name) ?? "";
    const now = address({ card: "" });
    if (now !== before) {
      before = now;
      list();
      const last = Math.max(1, Math.ceil(listed.length / TOGETHER)), page = Math.min(last, Math.max(1, +state.get("page") || 1));
      grid.replaceChildren(...listed.slice((page - 1) * TOGETHER, page * TOGETHER).map(thumbnail));
      count.textContent = `${listed.length} of ${items.length}`;
      const pages = browse.querySelector(".pages");
      pages.hidden = last < 2;
      pages.querySelector(".place").textContent = `page ${page} of ${last}`;
      link(pages.querySelector(".previous"), page > 1 && { page: page > 2 ? page - 1 : "", card: "" });
      link(pages.querySelector(".next"), page < last && { page: page + 1, card: "" });
    }
    view();
  }
  form.addEventListener("input", () => {
    const changes = Object.fromEntries([sort, show, classes, find].map((field) => [field.name, field.value]));
    history.replaceState(null, "", address({ ...changes, page: "", card: "" }));
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  browse.querySelector(".pages").addEventListener("click", () => browse.scrollIntoView());
  viewer.addEventListener("close", () => {
    document.querySelector(".bar-inner").append(controls);
    const left = grid.querySelector(`[href="${address({ card: state.get("card") })}"]`);
    if (state.get("card")) location.hash = address({ card: "" });
    left?.focus();
  });
  viewer.addEventListener("click", (event) => { if (event.target === viewer || event.target.className === "close") viewer.close(); });
  viewer.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: ".previous", ArrowRight: ".next" }[event.key];
    if (way) viewer.querySelector(way).click();
  });
  addEventListener("hashchange", update);
  update();
}

for (const card of document.querySelectorAll(".card")) prepare(card);
for (const browse of document.querySelectorAll(".browse")) browsing(browse);

// An answer word by word: a touched word shows what is behind it. Without a script all are shown.
for (const answer of document.querySelectorAll(".answer-words")) {
  const sentence = answer.querySelector(".sentence");
  const words = [...sentence.querySelectorAll("button")];
  const panels = [...answer.querySelectorAll(":scope > .behind")];
  const show = (chosen) => words.forEach((word, index) => {
    word.setAttribute("aria-pressed", index === chosen);
    panels[index].hidden = index !== chosen;
  });
  words.forEach((word, index) => word.addEventListener("click", () => show(index)));
  show(+sentence.dataset.first);
}
