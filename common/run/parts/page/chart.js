// Charts: numbers, scales and the drawing of a frame. What is drawn, and what is chosen, comes from the others.

const SVG = "http://www.w3.org/2000/svg";

// An element with attributes and children. A child that is no element becomes text, whatever is in it.
function element(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// --- numbers -------------------------------------------------------------------------------------------------------------

function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(2);
  for (const [unit, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e4, "k"],
  ]) {
    if (size >= unit) return trimmed((value / (letter === "k" ? 1e3 : unit)).toPrecision(3)) + letter;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size === 0 || size > 1.0001e-3) return trimmed(value.toPrecision(4));
  return trimmed(value.toExponential(2).replace("e", " e"))
    .replace(" ", "")
    .replace(/\.?0+e/, "e");
}

const trimmed = (text) => (/\.\d*?0+$/.test(text) ? text.replace(/\.?0+$/, "") : text);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${trimmed(seconds.toPrecision(3))} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

// Linear interpolation in two sorted columns; beyond their ends by the slope there.
function interpolate(xs, ys, x) {
  if (!xs.length) return x;
  if (xs.length === 1) return xs[0] ? (ys[0] * x) / xs[0] : ys[0];
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const share = xs[high] === xs[low] ? 0 : (x - xs[low]) / (xs[high] - xs[low]);
  return Math.max(0, ys[low] + share * (ys[high] - ys[low]));
}

// A mean over neighbours, weighted by a bell whose width is a share of all values: unlike an exponential mean it does not
// lag behind. amount: 0 to 1; at 1 the bell's standard deviation is a sixth of the values.
function smoothed(values, amount) {
  const width = (amount * amount * values.length) / 6,
    reach = Math.ceil(3 * width);
  const weights = Array.from({ length: reach + 1 }, (_, k) => Math.exp(-(k * k) / (2 * width * width)));
  if (width < 0.2) return values;
  return values.map((_, i) => {
    const before = Math.min(reach, i);
    const after = Math.min(before, values.length - 1 - i); // at the start as many on either side: it is often steep
    let sum = values[i];
    let norm = 1;
    for (let k = 1; k <= before; k++) {
      sum += weights[k] * (values[i - k] + (k <= after ? values[i + k] : 0));
      norm += weights[k] * (k <= after ? 2 : 1);
    }
    return sum / norm;
  });
}

function ticks(low, high, count, logarithmic) {
  if (logarithmic) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
    }
    const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    const decades = inside.filter((tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-9);
    if (inside.length > 1)
      return inside.length <= count + 1 || decades.length < 2 ? thinned(inside, count + 1) : thinned(decades, count + 1);
  }
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 4, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999) || 10 * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

const thinned = (list, most) => list.filter((_, i) => i % Math.ceil(list.length / most) === 0);

// --- a frame -------------------------------------------------------------------------------------------------------------

// frame: {name, log}; series: [{label, colour, eval, x: [], y: [], low, high}] with x in the unit that was chosen.
// settings(): {domain: [from, to], scale, smooth, unit, tick}; marks: [{x, kind, text}] that are drawn as thin lines.
class Chart {
  constructor(frame, series, marks, settings, height, listeners) {
    Object.assign(this, { frame, series, marks, settings, height, listeners });
    this.legend = element("span", { class: "legend" });
    this.svg = element("svg:svg", { class: "plot", height, role: "img", tabindex: "0" });
    this.node = element(
      "figure",
      { class: "frame" },
      element("figcaption", {}, element("b", { title: frame.name }, frame.name), this.legend),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => listeners.point(null));
    this.svg.addEventListener("pointerdown", (event) => {
      this.from = this.at(event);
    });
    this.svg.addEventListener("pointerup", (event) => this.zoom(event));
    this.svg.addEventListener("dblclick", () => listeners.zoom(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  draw() {
    const width = Math.max(180, Math.round(this.svg.getBoundingClientRect().width || this.node.clientWidth || 360));
    const { domain, scale, smooth, tick } = this.settings();
    const [left, right, top, bottom] = [44, 10, 8, 20];
    const lines = this.series.map((series) => within(series, domain, smooth));
    const ends = lines
      .flatMap((line) => [...line.y, ...line.drawn, ...(line.low || []), ...(line.high || [])])
      .filter(Number.isFinite);
    let low = Math.min(...ends),
      high = Math.max(...ends);
    const core = scale === "auto" ? withoutPeaks(lines) : null;
    if (core && high - low > 5 * (core[1] - core[0])) {
      // a single peak would flatten everything else: it is cut, and marked
      const room = 0.35 * (core[1] - core[0]);
      [low, high] = [Math.max(low, core[0] - room), Math.min(high, core[1] + room)];
    }
    const log = low > 0 && (scale === "log" || (scale === "auto" && this.frame.log));
    if (!ends.length) [low, high] = [0, 1];
    if (low === high) [low, high] = low ? [low - Math.abs(low) / 10, high + Math.abs(high) / 10] : [-1, 1];
    const pad = log ? (high / low) ** 0.04 : (high - low) * 0.05;
    const floor = low >= 0 && low - pad < 0 ? Math.min(0, low) : low - pad;
    [low, high] = log ? [low / pad, high * pad] : [floor, high + pad];
    const span = domain[1] - domain[0] || 1;
    const X = (x) => left + ((x - domain[0]) / span) * (width - left - right);
    const share = log ? (y) => Math.log(y / low) / Math.log(high / low) : (y) => (y - low) / (high - low);
    const Y = (y) =>
      this.height -
      bottom -
      Math.min(1, Math.max(0, share(Math.max(y, log ? 1e-300 : -Infinity)))) * (this.height - top - bottom);
    Object.assign(this, { low, high });
    Object.assign(this, { X, Y, lines, left, width, domain, right });

    const drawn = [];
    for (const y of ticks(low, high, this.height > 150 ? 4 : 3, log)) {
      drawn.push(element("svg:line", { class: "grid", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }));
      const narrow = shown(y).length > 6 ? { textLength: left - 8, lengthAdjust: "spacingAndGlyphs" } : {};
      drawn.push(element("svg:text", { class: "tick", x: left - 6, y: Y(y) + 3.5, "text-anchor": "end", ...narrow }, shown(y)));
    }
    for (const x of tick(domain, Math.max(3, Math.floor((width - left) / 85)))) {
      const end = X(x.at) + 3 * x.text.length > width;
      drawn.push(
        element(
          "svg:text",
          { class: "tick", x: end ? width - right : X(x.at), y: this.height - 5, "text-anchor": end ? "end" : "middle" },
          x.text,
        ),
      );
    }
    for (const mark of this.marks) {
      if (mark.x < domain[0] || mark.x > domain[1]) continue;
      drawn.push(
        element(
          "svg:line",
          { class: `mark ${mark.kind}`, x1: X(mark.x), x2: X(mark.x), y1: top, y2: this.height - bottom },
          element("svg:title", {}, mark.text),
        ),
      );
    }
    lines.forEach((line, i) => drawn.push(...this.curve(line, this.series[i], X, Y)));
    this.cursor = element("svg:g", { class: "cursor" });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute(
      "aria-label",
      `${this.frame.name}: ${this.series.map((s) => `${s.label} ${shown(s.y.at(-1))}`).join(", ")}`,
    );
    this.svg.replaceChildren(...drawn, this.cursor);
    this.show(null);
  }

  curve(line, series, X, Y) {
    const colour = `color: var(--${series.colour})`;
    const path = (ys) => line.x.map((x, i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(ys[i]).toFixed(1)}`).join("");
    const drawn = [];
    if (line.low && line.x.length > 1) {
      const back = line.x
        .map((x, i) => `L${X(x).toFixed(1)} ${Y(line.low[i]).toFixed(1)}`)
        .reverse()
        .join("");
      drawn.push(element("svg:path", { class: "band", style: colour, d: `${path(line.high)}${back}Z` }));
    }
    const cut = (line.high || line.y).map((y, i) => [i, y]).filter(([, y]) => y > this.high);
    for (const [i, y] of cut.slice(0, 40)) {
      drawn.push(
        element(
          "svg:path",
          { class: "peak", style: colour, d: `M${X(line.x[i]) - 3.5} 8h7l-3.5 -6z` },
          element("svg:title", {}, shown(y)),
        ),
      );
    }
    const few = series.eval ? line.x.length <= 12 : line.x.length === 1;
    if (!few) {
      if (line.drawn !== line.y) drawn.push(element("svg:path", { class: "raw", style: colour, d: path(line.y) }));
      drawn.push(element("svg:path", { class: series.eval ? "line eval" : "line", style: colour, d: path(line.drawn) }));
    }
    if (few || (series.eval && line.x.length <= 40)) {
      drawn.push(
        ...line.x.map((x, i) =>
          element("svg:circle", {
            class: "dot",
            style: colour,
            cx: X(x).toFixed(1),
            cy: Y(line.y[i]).toFixed(1),
            r: few ? 3.6 : 2.4,
          }),
        ),
      );
    }
    return drawn;
  }

  // The values at x under the pointer, of this frame or of another one; null: the last ones.
  show(x, here = false) {
    if (!this.lines) return;
    const marks = [];
    const values = this.series.map((series, i) => {
      const line = this.lines[i];
      const k = x === null ? line.x.length - 1 : nearest(line.x, x);
      if (k < 0) return null;
      const off = x !== null && Math.abs(this.X(line.x[k]) - this.X(x)) > (series.eval ? 30 : 60);
      if (x !== null && !off)
        marks.push(
          element("svg:circle", {
            class: "at",
            style: `color: var(--${series.colour})`,
            cx: this.X(line.x[k]),
            cy: this.Y(line.drawn[k]),
            r: 3.5,
          }),
        );
      const range = x !== null && line.low ? ` (${shown(line.low[k])} … ${shown(line.high[k])})` : "";
      return element(
        "span",
        {
          class: off ? "value off" : "value",
          style: `--colour: var(--${series.colour})`,
          title: series.title || series.label,
        },
        element("i", { class: series.eval ? "ring" : "dash" }),
        this.settings().named ? element("em", {}, series.label) : null,
        element("output", {}, off ? "–" : shown(line.y[k]) + range),
      );
    });
    this.legend.replaceChildren(...values.filter(Boolean));
    if (x === null) {
      this.cursor.replaceChildren();
      return;
    }
    const at = Math.min(Math.max(this.X(x), this.left), this.width - this.right);
    const right = at > this.width - 90;
    const label = here
      ? element(
          "svg:text",
          { class: "where", x: at + (right ? -5 : 5), y: 16, "text-anchor": right ? "end" : "start" },
          this.settings().unit(x),
        )
      : null;
    this.cursor.replaceChildren(
      element("svg:line", { x1: at, x2: at, y1: 6, y2: this.height - 20 }),
      ...marks,
      ...(label ? [label] : []),
    );
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    const share =
      ((event.clientX - box.left) * (this.width / box.width) - this.left) / (this.width - this.left - this.right);
    return this.domain[0] + Math.min(1, Math.max(0, share)) * (this.domain[1] - this.domain[0]);
  }

  point(event) {
    const x = this.at(event);
    this.listeners.point(x, this);
    if (this.from !== undefined && event.buttons) {
      const [a, b] = [this.X(this.from), this.X(x)].sort((p, q) => p - q);
      this.cursor.append(element("svg:rect", { class: "chosen", x: a, y: 6, width: b - a, height: this.height - 26 }));
    }
  }

  zoom(event) {
    const [from, to] = [this.from, this.at(event)].sort((a, b) => a - b);
    this.from = undefined;
    if (this.X(to) - this.X(from) > 12) this.listeners.zoom([from, to]);
  }

  key(event) {
    if (event.key === "Escape") this.listeners.zoom(null);
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const all = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const now = this.where === undefined ? all.length - 1 : nearest(all, this.where) + (event.key === "ArrowLeft" ? -1 : 1);
    this.where = all[Math.min(all.length - 1, Math.max(0, now))];
    this.listeners.point(this.where, this);
  }
}

// What of a series lies in the domain, with what is drawn of it.
function within(series, domain, smooth) {
  const wanted = !series.eval && !series.exact && smooth > 0 && series.y.length > 8;
  const drawn = wanted ? smoothed(series.y, smooth) : series.y;
  if (series.x[0] >= domain[0] && series.x.at(-1) <= domain[1]) return { ...series, drawn };
  const inside = series.x.map((x, i) => i).filter((i) => series.x[i] >= domain[0] && series.x[i] <= domain[1]);
  const pick = (list) => list && inside.map((i) => list[i]);
  const y = pick(series.y);
  return { x: pick(series.x), y, drawn: wanted ? pick(drawn) : y, low: pick(series.low), high: pick(series.high) };
}

// The range of what is drawn without single peaks: of the medians of five neighbours. null where there are few values.
function withoutPeaks(lines) {
  const found = lines
    .filter((line) => line.y.length >= 60)
    .flatMap(({ y }) => y.map((_, i) => y.slice(Math.max(0, i - 2), i + 3).sort((a, b) => a - b)[2]));
  const rest = lines.filter((line) => line.y.length < 60).flatMap((line) => line.y);
  const values = [...found, ...rest].filter(Number.isFinite);
  return found.length ? [Math.min(...values), Math.max(...values)] : null;
}

// The place of the number in a sorted list that is nearest to x; -1 in an empty list.
function nearest(xs, x) {
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return high < 0 ? -1 : Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}
