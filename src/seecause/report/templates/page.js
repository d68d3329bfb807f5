"use strict";
// Opacity and smoothing are page-wide; the pointer is shared by all figures of a card, so maps can be compared patch by patch.
const root = document.documentElement;
const opacity = document.getElementById("opacity");
opacity.addEventListener("input", () => root.style.setProperty("--heat", opacity.value / 100));
root.style.setProperty("--heat", opacity.value / 100);
const smooth = document.getElementById("smooth");
const setSmooth = () => document.body.classList.toggle("patches", !smooth.checked);
smooth.addEventListener("change", setSmooth);
setSmooth();

function point(card, rows, columns, row, column) {
  for (const cursor of card.querySelectorAll(".cursor")) {
    Object.assign(cursor.style, {
      display: "block", left: `${100 * column / columns}%`, top: `${100 * row / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%`,
    });
  }
  for (const map of card.querySelectorAll(".map")) {
    map.values ??= JSON.parse(map.dataset.values);
    const same = +map.dataset.rows === rows && +map.dataset.columns === columns;
    map.querySelector(".read").textContent = same ? `row ${row}, column ${column}: ${map.values[row * columns + column]}` : "";
  }
}

function leave(card) {
  for (const cursor of card.querySelectorAll(".cursor")) cursor.style.display = "none";
  for (const read of card.querySelectorAll(".read")) read.textContent = "";
}

for (const card of document.querySelectorAll(".card")) {
  const first = card.querySelector(".map");
  for (const stack of card.querySelectorAll(".stack")) {
    const { rows, columns } = (stack.closest(".map") ?? first).dataset;
    stack.addEventListener("pointermove", (event) => {
      const box = stack.getBoundingClientRect();
      const within = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
      point(card, +rows, +columns, within((event.clientY - box.top) / box.height, +rows), within((event.clientX - box.left) / box.width, +columns));
    });
    stack.addEventListener("pointerleave", () => leave(card));
  }
}

// Pages of many images: cards are sorted by a number they carry, and hidden where they do not match.
for (const form of document.querySelectorAll(".sorter")) {
  const list = form.nextElementSibling;
  const cards = [...list.querySelectorAll(":scope > .card")];
  const { sort, show, find, count } = form.elements;
  const known = (key) => cards.some((card) => card.dataset[key] !== undefined);
  for (const option of [...sort.options]) if (option.value && !known(option.value.split(" ")[0])) option.remove();
  show.parentElement.hidden = !known("answer");
  const update = () => {
    const [key, direction] = sort.value.split(" ");
    const value = (card) => (key && card.dataset[key] !== undefined ? +card.dataset[key] : NaN);
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return direction === "down" ? y - x : x - y;
    };
    const sorted = key ? [...cards].sort(order) : cards;
    list.append(...sorted);
    const words = find.value.trim().toLowerCase();
    let shown = 0;
    for (const card of cards) {
      const right = !show.value || card.dataset.answer === show.value;
      const named = !words || card.querySelector("header").textContent.toLowerCase().includes(words);
      card.hidden = !(right && named);
      shown += !card.hidden;
    }
    count.textContent = `${shown} of ${cards.length}`;
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = cards.length < 4;
  update();
}

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
