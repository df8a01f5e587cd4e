// Elements, numbers and tables, which all parts of the page are made of.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes and children. A child that is no element becomes text, whatever is in it.
function element(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const button = (label, onclick, attributes = {}) =>
  element("button", { type: "button", class: "plain", onclick, ...attributes }, label);

// A text that stands on the right of its column.
const figure = (text) => element("span", { class: "number" }, text);
const dim = (...texts) => element("span", { class: "dim" }, texts);

// A table. A row: cells, or {cells, class}; a cell: a text, an element or a number. Columns without any value are left out.
function table(head, rows, kind = "") {
  const all = rows.map((row) => (Array.isArray(row) ? { cells: row } : row));
  const isEmpty = (cell) => cell === null || cell === undefined || cell === "";
  const columns = all.length ? [...all[0].cells.keys()].filter((i) => all.some(({ cells }) => !isEmpty(cells[i]))) : [];
  const isNumber = (cell) => typeof cell === "number" || cell?.className === "number";
  const kinds = columns.map((i) => ({ class: all.some(({ cells }) => isNumber(cells[i])) && "number" }));
  const titles = columns.map((i, n) => element("th", kinds[n], head?.[i] ?? ""));
  const text = (cell) => (typeof cell === "number" ? shown(cell) : (cell ?? "–"));
  const body = all.map((row) => {
    const cells = columns.map((i, n) => element("td", kinds[n], text(row.cells[i])));
    return element("tr", { class: row.class }, cells);
  });
  return element(
    "div",
    { class: "wide" },
    element("table", { class: kind }, head && element("thead", {}, element("tr", {}, titles)), element("tbody", {}, body)),
  );
}

function section(id, title, aside, ...content) {
  return element("section", { id }, element("h2", {}, title, aside && element("small", {}, aside)), content);
}

// --- numbers ----------------------------------------------------------------------------------------------------------

const UNITS = [
  [1e9, 1e9, "G"],
  [1e6, 1e6, "M"],
  [1e4, 1e3, "k"],
];

function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(2);
  for (const [least, unit, letter] of UNITS) {
    if (size >= least) return three(value / unit) + letter;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size === 0 || size > 1.0001e-3) return trimmed(value.toPrecision(4));
  const [digits, power] = value.toExponential(2).split("e");
  return `${trimmed(digits)}e${power}`;
}

const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
const percent = (share) => (share === null || share === undefined ? null : `${three(100 * share)} %`);
const three = (value) => trimmed(value.toPrecision(3)); // digits
const gib = (value) => (value >= 1 ? `${three(value)} GiB` : `${three(value * 1024)} MiB`);
const when = (seconds) => new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

function duration(seconds) {
  if (seconds === null || seconds === undefined) return null;
  if (seconds < 120) return `${three(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

// The place of the number in a sorted list that is nearest to x; -1 in an empty list.
function nearest(xs, x) {
  let best = xs.length - 1;
  for (let i = best; i >= 0 && Math.abs(xs[i] - x) <= Math.abs(xs[best] - x); i--) best = i;
  return best;
}
