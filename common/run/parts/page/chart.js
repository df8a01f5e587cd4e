// Charts: scales and the drawing of a frame. What is drawn, and what is chosen, comes from the others.

const [LEFT, RIGHT, TOP, BOTTOM] = [48, 10, 8, 20]; // of the plot in its frame
const SMALLEST = 0.1; // span of an axis of shares

// Linear interpolation in two sorted columns; beyond their ends by the slope there.
function interpolate(xs, ys, x) {
  if (xs.length < 2) return 0;
  const above = xs.findIndex((known) => known > x);
  const high = above < 0 ? xs.length - 1 : Math.max(1, above);
  const span = xs[high] - xs[high - 1];
  const share = span ? (x - xs[high - 1]) / span : 0;
  return Math.max(0, ys[high - 1] + share * (ys[high] - ys[high - 1]));
}

// A mean over neighbours, weighted by a bell whose width is a share of all values: unlike an exponential mean it does not
// lag behind. amount: 0 to 1; at 1 the bell's standard deviation is a sixth of the values.
function smoothed(values, amount) {
  const width = (amount * amount * values.length) / 6;
  if (width < 0.2) return values;
  const reach = Math.ceil(3 * width);
  const weights = Array.from({ length: reach + 1 }, (_, k) => Math.exp(-(k * k) / (2 * width * width)));
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
  const atMost = (list) => list.filter((_, i) => i % Math.ceil(list.length / (count + 1)) === 0);
  if (logarithmic) {
    const powers = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) powers.push(power);
    const isInside = (tick) => tick >= low * 0.999 && tick <= high * 1.001;
    const decades = powers.map((power) => +`1e${power}`).filter(isInside);
    const found = powers.flatMap((power) => [1, 2, 5].map((digit) => +`${digit}e${power}`)).filter(isInside);
    if (found.length > count + 1 && decades.length > 1) return atMost(decades);
    if (found.length > 1) return atMost(found);
  }
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 4, 5].find((digit) => digit * power >= rough * 0.999) || 10);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

// The vertical axis of a frame for these lines: {low, high, log}.
function verticalAxis(frame, lines, scale) {
  const ends = lines.flatMap((line) => [...line.y, ...line.drawn, ...(line.low || []), ...(line.high || [])]);
  if (!ends.length) return { low: 0, high: 1, log: false };
  let [low, high] = [Math.min(...ends), Math.max(...ends)];
  const core = scale === "auto" ? withoutPeaks(lines) : null;
  if (core && high - low > 5 * (core[1] - core[0])) {
    // a single peak would flatten everything else: it is cut, and marked
    const room = 0.35 * (core[1] - core[0]);
    [low, high] = [Math.max(low, core[0] - room), Math.min(high, core[1] + room)];
  }
  if (low > 0 && (scale === "log" || (scale === "auto" && frame.log))) {
    const room = low === high ? 1.1 : (high / low) ** 0.04;
    return { low: low / room, high: high * room, log: true };
  }
  const least = frame.share ? SMALLEST : low === high ? Math.abs(low) / 5 || 1 : 0; // span
  const missing = Math.max(0, least - (high - low));
  const room = missing / 2 + 0.05 * (high - low + missing); // on either side
  let [from, to] = [low - room, high + room];
  if (low >= 0 && from < 0) [from, to] = [0, Math.max(to, least)];
  if (frame.share && to > 1) [from, to] = [Math.min(from, 1 - least), 1.02]; // a value of 1 is not on the edge
  return { low: from, high: to, log: false };
}

// The range of what is drawn without single peaks: of the medians of five neighbours. null where there are few values.
function withoutPeaks(lines) {
  const long = lines.filter((line) => line.y.length >= 60);
  if (!long.length) return null;
  const middle = (list) => [...list].sort((a, b) => a - b)[2];
  const medians = long.flatMap(({ y }) => y.slice(4).map((_, i) => middle(y.slice(i, i + 5))));
  const values = [...medians, ...lines.filter((line) => !long.includes(line)).flatMap((line) => line.y)];
  return [Math.min(...values), Math.max(...values)];
}

// What of a series lies in the domain, with what is drawn of it.
function within(series, domain, smooth) {
  const isSmoothed = !series.eval && !series.exact && smooth > 0 && series.y.length > 8;
  const drawn = isSmoothed ? smoothed(series.y, smooth) : series.y;
  const inside = [...series.x.keys()].filter((i) => series.x[i] >= domain[0] && series.x[i] <= domain[1]);
  const pick = (list) => list && inside.map((i) => list[i]);
  const { x, y, low, high } = series;
  return { x: pick(x), y: pick(y), drawn: pick(drawn), low: pick(low), high: pick(high), isSmoothed };
}

// frame: {name, log, share}; series: [{label, colour, eval, x: [], y: [], low, high}] with x in the unit that was chosen.
// settings(): {domain: [from, to], scale, smooth, unit, tick}; marks: [{x, kind, text}] that are drawn as thin lines.
class Chart {
  constructor(frame, series, marks, settings, height, listeners) {
    Object.assign(this, { frame, series, marks, settings, height, listeners });
    this.legend = element("span", { class: "legend" });
    this.svg = element("svg:svg", { class: "plot", height, role: "img", tabindex: "0" });
    const files = [button("CSV", () => saveTable(this)), button("PNG", () => savePicture(this))];
    const save = element("span", { class: "save" }, files);
    const title = element("span", { class: "name" }, element("b", { title: frame.name }, frame.name), save);
    this.node = element("figure", { class: "frame" }, element("figcaption", {}, title, this.legend), this.svg);
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
    const { domain, scale, smooth, tick } = this.settings();
    this.width = Math.max(180, Math.round(this.svg.getBoundingClientRect().width || 360));
    this.domain = domain;
    this.lines = this.series.map((series) => within(series, domain, smooth));
    this.axis = verticalAxis(this.frame, this.lines, scale);
    const right = this.width - RIGHT;
    const drawn = [];
    for (const y of ticks(this.axis.low, this.axis.high, this.height > 150 ? 4 : 3, this.axis.log)) {
      drawn.push(element("svg:line", { class: "grid", x1: LEFT, x2: right, y1: this.Y(y), y2: this.Y(y) }));
      drawn.push(element("svg:text", { class: "tick end", x: LEFT - 5, y: this.Y(y) + 3.5 }, shown(y)));
    }
    for (const { at, text } of tick(domain, Math.max(3, Math.floor((this.width - LEFT) / 85)))) {
      const isLast = this.X(at) + 3 * text.length > this.width;
      const place = isLast ? { class: "tick end", x: right } : { class: "tick middle", x: this.X(at) };
      drawn.push(element("svg:text", { ...place, y: this.height - 5 }, text));
    }
    for (const mark of this.marks.filter(({ x }) => x >= domain[0] && x <= domain[1])) {
      const ends = { x1: this.X(mark.x), x2: this.X(mark.x), y1: TOP, y2: this.height - BOTTOM };
      drawn.push(element("svg:line", { class: `mark ${mark.kind}`, ...ends }, element("svg:title", {}, mark.text)));
    }
    this.lines.forEach((line, i) => drawn.push(...this.curve(line, this.series[i])));
    this.cursor = element("svg:g", { class: "cursor" });
    const last = this.series.map((series) => `${series.label} ${shown(series.y.at(-1))}`);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("aria-label", `${this.frame.name}: ${last.join(", ")}`);
    this.svg.replaceChildren(...drawn, this.cursor);
    this.show(null);
  }

  X(x) {
    const [from, to] = this.domain;
    return LEFT + ((x - from) / (to - from || 1)) * (this.width - LEFT - RIGHT);
  }

  Y(y) {
    const { low, high, log } = this.axis;
    const share = log ? Math.log(Math.max(y, 1e-300) / low) / Math.log(high / low) : (y - low) / (high - low);
    return this.height - BOTTOM - Math.min(1, Math.max(0, share)) * (this.height - TOP - BOTTOM);
  }

  curve(line, series) {
    const style = `color: var(--${series.colour})`;
    const points = (ys) => line.x.map((x, i) => `${this.X(x).toFixed(1)} ${this.Y(ys[i]).toFixed(1)}`);
    const path = (kind, list) => element("svg:path", { class: kind, style, d: `M${list.join("L")}` });
    const drawn = [];
    if (line.low && line.x.length > 1) drawn.push(path("band", [...points(line.high), ...points(line.low).reverse()]));
    (line.high || line.y).forEach((y, i) => {
      if (y > this.axis.high) {
        const d = `M${this.X(line.x[i]) - 3.5} 8h7l-3.5 -6z`;
        drawn.push(element("svg:path", { class: "peak", style, d }, element("svg:title", {}, shown(y))));
      }
    });
    if (line.x.length > 1) {
      if (line.isSmoothed) drawn.push(path("raw", points(line.y)));
      drawn.push(path(series.eval ? "line eval" : "line", points(line.drawn)));
    }
    if (line.x.length === 1 || (series.eval && line.x.length <= 40)) {
      const r = line.x.length <= 12 ? 3.2 : 2.2;
      drawn.push(
        ...line.x.map((x, i) => element("svg:circle", { class: "dot", style, cx: this.X(x), cy: this.Y(line.y[i]), r })),
      );
    }
    return drawn;
  }

  // The values at x under the pointer, of this frame or of another one; null: the last ones.
  show(x, here = false) {
    if (!this.lines) return;
    const { named, unit } = this.settings();
    const marks = [];
    const values = this.series.map((series, i) => {
      const line = this.lines[i];
      const k = x === null ? line.x.length - 1 : nearest(line.x, x);
      if (k < 0) return null;
      const isFar = x !== null && Math.abs(this.X(line.x[k]) - this.X(x)) > (series.eval ? 30 : 60);
      const place = { cx: this.X(line.x[k]), cy: this.Y(line.drawn[k]), r: 3.5 };
      if (x !== null && !isFar)
        marks.push(element("svg:circle", { class: "at", style: `color: var(--${series.colour})`, ...place }));
      const range = x !== null && line.low ? ` (${shown(line.low[k])} … ${shown(line.high[k])})` : "";
      return element(
        "span",
        { class: "value", style: `--colour: var(--${series.colour})`, title: series.title },
        element("i", { class: series.eval ? "ring" : "dash" }),
        named && series.label ? element("em", {}, series.label) : null,
        element("output", {}, isFar ? "–" : shown(line.y[k]) + range),
      );
    });
    this.legend.replaceChildren(...values.filter(Boolean));
    this.cursor.replaceChildren();
    if (x === null) return;
    const at = Math.min(Math.max(this.X(x), LEFT), this.width - RIGHT);
    const isRight = at > this.width - 90;
    const label = { class: isRight ? "where end" : "where", x: at + (isRight ? -5 : 5), y: 16 };
    this.cursor.append(element("svg:line", { x1: at, x2: at, y1: 6, y2: this.height - BOTTOM }), ...marks);
    if (here) this.cursor.append(element("svg:text", label, unit(x)));
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * (this.width / box.width) - LEFT) / (this.width - LEFT - RIGHT);
    return this.domain[0] + Math.min(1, Math.max(0, share)) * (this.domain[1] - this.domain[0]);
  }

  point(event) {
    const x = this.at(event);
    this.listeners.point(x, this);
    if (this.from === undefined || !event.buttons) return;
    const [a, b] = [this.X(this.from), this.X(x)].sort((p, q) => p - q);
    this.cursor.append(element("svg:rect", { class: "chosen", x: a, y: 6, width: b - a, height: this.height - 26 }));
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
    const next = nearest(all, this.where ?? all.at(-1)) + (event.key === "ArrowLeft" ? -1 : 1);
    this.where = all[Math.min(all.length - 1, Math.max(0, next))];
    this.listeners.point(this.where, this);
  }
}

// --- files of a chart -------------------------------------------------------------------------------------------------

function download(name, href) {
  element("a", { href, download: name.replaceAll("/", "_") }).click();
}

// step,curve,value: as a spreadsheet or pandas read it, whichever axis is shown.
function tableOf({ series }) {
  const rows = series.flatMap((curve) => curve.steps.map((step, i) => [step, curve.title, curve.y[i]]));
  const quoted = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  return [["step", "curve", "value"], ...rows].map((row) => `${row.map(quoted).join(",")}\n`).join("");
}

function saveTable(chart) {
  download(`${chart.frame.name}.csv`, URL.createObjectURL(new Blob([tableOf(chart)], { type: "text/csv" })));
}

// What a picture takes over from the page's style.
const DRAWN = "color fill stroke stroke-width stroke-dasharray opacity font-size font-family text-anchor".split(" ");

// The chart with its title and last values, at twice its size.
function savePicture(chart) {
  const [width, height] = [chart.width, chart.height + 24];
  const copy = chart.svg.cloneNode(true);
  const nodes = copy.querySelectorAll("*");
  chart.svg.querySelectorAll("*").forEach((node, i) => {
    const style = getComputedStyle(node);
    nodes[i].setAttribute("style", DRAWN.map((name) => `${name}: ${style.getPropertyValue(name)}`).join("; "));
  });
  const { color, backgroundColor, fontFamily } = getComputedStyle(document.body);
  const title = `${chart.frame.name}: ${[...chart.legend.children].map((value) => value.innerText).join("  ")}`;
  const size = { xmlns: SVG, width: 2 * width, height: 2 * height, viewBox: `0 -24 ${width} ${height}` };
  Object.entries(size).forEach(([name, value]) => copy.setAttribute(name, value));
  copy.prepend(
    element("svg:rect", { y: -24, width, height, fill: backgroundColor }),
    element("svg:text", { x: 8, y: -8, fill: color, style: `font: 600 12px ${fontFamily}` }, title),
  );
  const image = new Image();
  image.onload = () => {
    const canvas = element("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0);
    download(`${chart.frame.name}.png`, canvas.toDataURL("image/png"));
  };
  image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}
