// A picture with its grid of patches: a map over it, sets of patches outlined, a brush, a cursor
// that the keyboard moves. And a grid of heads, each a button.

import { h, short } from "./parts.js";

const SVG = "http://www.w3.org/2000/svg";

export class PatchPicture {
  // onhover(place or null), onpaint(places, {first, last}): patches under the pointer while it is
  // down, one call for each move; `label` names the picture to a screen reader.
  constructor({ label, onhover = () => {}, onpaint = null, caption = "" }) {
    this.onhover = onhover;
    this.onpaint = onpaint;
    this.title = caption; // before a picture has a name
    this.rows = this.columns = 0; // until a picture is there; nothing is brushed before
    this.cursor = null;
    this.image = h("img", { alt: "", class: "base", draggable: "false" });
    this.heat = h("img", { alt: "", class: "heat", hidden: true, draggable: "false" });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true");
    this.paths = new Map();
    this.sets = new Map(); // kind -> what setPatches was called with
    this.stack = h("div", { class: "stack touch", tabindex: "0", role: "application", "aria-label": label }, this.image, this.heat);
    this.stack.append(this.svg);
    this.painting = onpaint !== null; // whether a finger paints; otherwise it scrolls the page
    this.stack.classList.toggle("paints", this.painting);
    this.caption = h("figcaption", {}, caption);
    this.element = h("figure", { class: "patch-picture" }, this.caption, this.stack);
    this.listen();
  }

  setPicture(uri, [rows, columns], [height, width]) {
    Object.assign(this, { rows, columns });
    this.image.src = uri;
    this.image.classList.toggle("pixelated", Math.max(height, width) <= 128);
    this.stack.style.setProperty("--ratio", `${width} / ${height}`);
    this.svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    for (const [kind, [places, look]] of this.sets) this.setPatches(kind, places, look); // the grid may be another
  }

  setPainting(on) {
    this.painting = on;
    this.stack.classList.toggle("paints", on);
  }

  // A handle that wipes the map away: image on the left of it, map on the right.
  addWipe() {
    const line = h("span", { class: "wipe-line", "aria-hidden": "true" });
    this.wipe = h("input", { type: "range", class: "wipe", min: "0", max: "100", value: "50", "aria-label": "Wipe between image and map" });
    this.setWipe = (value) => {
      this.wipe.value = value;
      this.stack.style.setProperty("--wipe", `${value}%`);
    };
    this.wipe.addEventListener("input", () => this.setWipe(this.wipe.value));
    this.stack.classList.add("wiped");
    this.stack.append(line);
    this.element.append(this.wipe);
    this.setWipe(50);
    const follow = (event) => {
      const box = this.stack.getBoundingClientRect();
      this.setWipe(Math.round(Math.min(100, Math.max(0, (100 * (event.clientX - box.left)) / box.width))));
    };
    this.stack.addEventListener("pointerdown", (event) => {
      if (this.painting || event.button !== 0) return;
      this.stack.setPointerCapture(event.pointerId);
      follow(event);
    });
    this.stack.addEventListener("pointermove", (event) => { if (!this.painting && event.buttons === 1) follow(event); });
  }

  // No picture, until there is one again.
  clear() {
    this.image.removeAttribute("src");
    this.caption.textContent = this.title;
    this.setHeat("");
  }

  setHeat(uri) {
    this.heat.hidden = !uri;
    if (uri) this.heat.src = uri;
    this.stack.classList.toggle("with-heat", Boolean(uri));
  }

  // A named set of patches: `kind` is its class (brush, enough, needed, one, other, cursor).
  setPatches(kind, places, { fill = false } = {}) {
    this.sets.set(kind, [places, { fill }]);
    if (!this.paths.has(kind)) this.paths.set(kind, this.newPaths(kind, fill));
    const inside = places.filter((place) => place < this.rows * this.columns);
    const line = fill ? this.squares(inside) : this.outline(inside);
    for (const path of this.paths.get(kind)) path.setAttribute("d", line);
    this.stack.setAttribute(`data-${kind}`, String(places.length));
  }

  // A line has a dark one below it, so that it is seen on any picture.
  newPaths(kind, fill) {
    const paths = (fill ? [kind] : [`shade ${kind}`, kind]).map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", `set ${name}`);
      path.setAttribute("vector-effect", "non-scaling-stroke");
      return path;
    });
    this.svg.append(...paths);
    return paths;
  }

  squares(places) {
    return places.map((place) => `M${place % this.columns} ${Math.floor(place / this.columns)}h1v1h-1z`).join("");
  }

  outline(places) {
    const inside = new Set(places);
    const lines = [];
    for (const place of inside) {
      const column = place % this.columns;
      const row = Math.floor(place / this.columns);
      if (row === 0 || !inside.has(place - this.columns)) lines.push(`M${column} ${row}h1`);
      if (row === this.rows - 1 || !inside.has(place + this.columns)) lines.push(`M${column} ${row + 1}h1`);
      if (column === 0 || !inside.has(place - 1)) lines.push(`M${column} ${row}v1`);
      if (column === this.columns - 1 || !inside.has(place + 1)) lines.push(`M${column + 1} ${row}v1`);
    }
    return lines.join("");
  }

  placeAt(event) {
    const box = this.stack.getBoundingClientRect();
    const within = (share, many) => Math.min(many - 1, Math.max(0, Math.floor(share * many)));
    const row = within((event.clientY - box.top) / box.height, this.rows);
    return row * this.columns + within((event.clientX - box.left) / box.width, this.columns);
  }

  // All places between two: a quick pointer skips patches.
  between(from, to) {
    const [c0, r0, c1, r1] = [from % this.columns, Math.floor(from / this.columns), to % this.columns, Math.floor(to / this.columns)];
    const steps = Math.max(Math.abs(c1 - c0), Math.abs(r1 - r0), 1);
    return Array.from({ length: steps + 1 }, (_, step) => {
      const column = Math.round(c0 + ((c1 - c0) * step) / steps);
      return Math.round(r0 + ((r1 - r0) * step) / steps) * this.columns + column;
    });
  }

  point(place) {
    this.cursor = place;
    this.setPatches("cursor", place === null ? [] : [place]);
    this.onhover(place);
  }

  listen() {
    let last = null;
    const paint = (event, first) => {
      const place = this.placeAt(event);
      this.onpaint(first ? [place] : this.between(last, place), { first });
      last = place;
    };
    this.stack.addEventListener("pointermove", (event) => {
      if (!this.rows) return;
      const place = this.placeAt(event);
      if (place !== this.cursor) this.point(place);
      if (last !== null && this.painting && place !== last) paint(event, false);
    });
    this.stack.addEventListener("pointerleave", () => { if (last === null) this.point(null); });
    this.stack.addEventListener("pointerdown", (event) => {
      if (!this.painting || !this.rows || event.button !== 0) return;
      this.stack.setPointerCapture(event.pointerId);
      paint(event, true);
    });
    for (const name of ["pointerup", "pointercancel"]) this.stack.addEventListener(name, () => { last = null; });
    this.stack.addEventListener("keydown", (event) => this.key(event));
    this.stack.addEventListener("blur", () => this.point(null));
  }

  key(event) {
    if (!this.rows) return;
    const place = this.cursor ?? 0;
    const [row, column] = [Math.floor(place / this.columns), place % this.columns];
    const moves = {
      ArrowUp: row > 0 ? place - this.columns : place,
      ArrowDown: row < this.rows - 1 ? place + this.columns : place,
      ArrowLeft: column > 0 ? place - 1 : place,
      ArrowRight: column < this.columns - 1 ? place + 1 : place,
      Home: row * this.columns,
      End: row * this.columns + this.columns - 1,
    };
    if (event.key in moves) {
      event.preventDefault();
      const next = this.cursor === null ? place : moves[event.key];
      if (event.shiftKey && this.painting) this.onpaint([next], { first: false, key: true });
      this.point(next);
    } else if ((event.key === " " || event.key === "Enter") && this.painting && this.cursor !== null) {
      event.preventDefault();
      this.onpaint([place], { first: true, key: true });
    }
  }

  // Patches `from` of another picture drawn at `places` of this one.
  paste(other, from, places) {
    this.pasted ??= h("canvas", { class: "pasted" });
    if (!this.pasted.isConnected) this.image.after(this.pasted);
    const [wide, high] = [other.image.naturalWidth / other.columns, other.image.naturalHeight / other.rows];
    Object.assign(this.pasted, { width: wide * this.columns, height: high * this.rows });
    const canvas = this.pasted.getContext("2d");
    places.forEach((place, index) => {
      const [column, row] = [from[index] % other.columns, Math.floor(from[index] / other.columns)];
      canvas.drawImage(other.image, column * wide, row * high, wide, high, (place % this.columns) * wide, Math.floor(place / this.columns) * high, wide, high);
    });
  }

  // The patches around one, with itself.
  around(place) {
    const [row, column] = [Math.floor(place / this.columns), place % this.columns];
    const near = [];
    for (let r = Math.max(0, row - 1); r <= Math.min(this.rows - 1, row + 1); r += 1) {
      for (let c = Math.max(0, column - 1); c <= Math.min(this.columns - 1, column + 1); c += 1) near.push(r * this.columns + c);
    }
    return near;
  }

  where(place) {
    return `row ${Math.floor(place / this.columns)}, column ${place % this.columns}`;
  }
}

// A button for each layer (down) and head (across), coloured by a value; pressed ones are `word`.
export class HeadButtons {
  constructor(word, ontoggle) {
    this.word = word;
    this.ontoggle = ontoggle;
    this.element = h("table", { class: "head-buttons" });
  }

  build({ layers, heads }) {
    this.width = Math.max(...heads);
    const columns = Array.from({ length: this.width }, (_, head) => head);
    this.element.replaceChildren(
      h("caption", { class: "quiet" }, `Heads, layer by layer; a pressed button is a head that is ${this.word}`),
      h("thead", {}, h("tr", {}, h("td"), columns.map((head) => h("th", { scope: "col" }, String(head))))),
      h("tbody", {}, Array.from({ length: layers }, (_, layer) => h("tr", {}, h("th", { scope: "row" }, `layer ${layer}`),
        columns.map((head) => h("td", {}, head < heads[layer] ? this.button(layer * this.width + head) : null))))));
  }

  button(place) {
    return h("button", { type: "button", "data-place": String(place), onclick: () => this.ontoggle(place), onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.width, ArrowUp: -this.width }[event.key];
      const next = step && this.element.querySelector(`[data-place="${place + step}"]`);
      if (!next) return;
      event.preventDefault();
      next.focus();
    } });
  }

  // `values` by layer and head, or null; `words` says more of a head, places of `framed` are marked.
  colour(values, pressed, { framed = [], words = () => "" } = {}) {
    const reach = Math.max(...(values ?? []).flat().map((value) => Math.abs(value ?? 0)), 1e-12);
    for (const button of this.element.querySelectorAll("button")) {
      const place = +button.dataset.place;
      const [layer, head] = [Math.floor(place / this.width), place % this.width];
      const value = values?.[layer]?.[head] ?? null;
      button.className = `${value === null ? "none" : value >= 0 ? "for" : "against"}${framed.includes(place) ? " enough" : ""}`;
      button.style.setProperty("--strength", `${value === null ? 0 : 100 * Math.min(1, Math.abs(value) / reach)}%`);
      button.textContent = value === null ? "" : reach < 0.1 || reach >= 1000 ? short(value) : value.toFixed(3).replace("-", "−");
      button.title = `layer ${layer}, head ${head}: ${short(value)}${value === null ? "" : words(layer, head)}`;
      button.setAttribute("aria-pressed", String(pressed.includes(place)));
      const read = button.textContent || "–"; // the name holds what is written on the button
      button.setAttribute("aria-label", `layer ${layer}, head ${head}: ${read}${value === null ? "" : words(layer, head)}${pressed.includes(place) ? `, ${this.word}` : ""}`);
    }
  }
}
