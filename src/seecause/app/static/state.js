// One state for the whole page, written into the URL's hash: a link restores everything.
//
//   #explain?model=critters-vit&image=s3&explain.patches=4-7.18
//
// Model and image are the same for all panels. Every panel has a part of its own; only fields that differ from their defaults are written. A
// field has the type of its default: text, number (or null), true or false, or a list of numbers.

const parts = new Map();

export function declare(panel, defaults) {
  parts.set(panel, defaults);
}

export function encode(state) {
  const words = new URLSearchParams();
  if (state.model) words.set("model", state.model);
  if (state.image) words.set("image", state.image);
  for (const [panel, defaults] of parts) {
    for (const [name, standard] of Object.entries(defaults)) {
      const value = state[panel][name];
      if (write(value) !== write(standard)) words.set(`${panel}.${name}`, write(value));
    }
  }
  return `#${state.panel}?${words}`;
}

export function decode(hash, fallback, image) {
  const [panel, query = ""] = hash.replace(/^#/, "").split("?");
  const words = new URLSearchParams(query);
  const state = { panel: parts.has(panel) ? panel : fallback, model: words.get("model") ?? "", image: words.get("image") ?? image };
  for (const [name, defaults] of parts) {
    state[name] = {};
    for (const [field, standard] of Object.entries(defaults)) {
      const text = words.get(`${name}.${field}`);
      state[name][field] = text === null ? standard : read(text, standard);
    }
  }
  return state;
}

function write(value) {
  if (value === null || value === undefined) return "";
  return Array.isArray(value) ? ranges(value) : String(value);
}

function read(text, standard) {
  if (Array.isArray(standard)) return numbers(text);
  if (typeof standard === "boolean") return text === "true";
  if (typeof standard === "number" || standard === null) return text === "" || Number.isNaN(+text) ? null : +text;
  return text;
}

// 4, 5, 6, 7, 18 -> "4-7.18"
export function ranges(values) {
  const sorted = [...new Set(values)].sort((a, b) => a - b);
  const words = [];
  for (let first = 0; first < sorted.length; ) {
    let last = first;
    while (sorted[last + 1] === sorted[last] + 1) last += 1;
    words.push(first === last ? `${sorted[first]}` : `${sorted[first]}-${sorted[last]}`);
    first = last + 1;
  }
  return words.join(".");
}

export function numbers(text) {
  const values = [];
  for (const word of text.split(".").filter(Boolean)) {
    const [first, last = first] = word.split("-").map(Number);
    if (!Number.isInteger(first) || !Number.isInteger(last) || last - first > 65535) continue;
    for (let value = first; value <= last; value += 1) values.push(value);
  }
  return values;
}
