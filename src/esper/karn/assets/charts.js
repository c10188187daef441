// Charts as SVG, drawn at the width that they have, when they come into view. A value that is null is a gap.

import { h, interval, number, s } from "./dom.js";

const HEIGHT = 190;
const MARGIN = { left: 56, right: 12, top: 8, bottom: 34 };
const COLOURS = 8;
const LARGEST = 1e300;
const colour = (i) => `c${i % COLOURS}${i >= COLOURS ? " dashed" : ""}`;
const finite = (v) => v !== null && Math.abs(v) < LARGEST;

/** Round numbers within a range, at steps of 1, 2 or 5 times a power of ten. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((f) => f >= rough * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => (first + i) * step);
}

/** The axes of a chart and the scales from values to pixels. */
class Frame {
  constructor(width, [x0, x1], [low, high], label) {
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    if (high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high))) {
      [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    }
    const pad = (high - low) * 0.05;
    [low, high] = [low && low - pad, high && high + pad];
    const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, HEIGHT - MARGIN.bottom];
    this.x = (v) => left + (v - x0) / (x1 - x0) * (right - left);
    this.y = (v) => bottom - (v - low) / (high - low) * (bottom - top);
    this.level = (v, kind) => s("line", { class: kind, x1: left, x2: right, y1: this.y(v), y2: this.y(v) });
    const marks = ticks(low, high, 5);
    const digits = Math.max(0, Math.ceil(-Math.log10((marks[1] ?? 1) - (marks[0] ?? 0)) - 1e-9));
    const written = (v) => (digits < 5 && Math.abs(v) < 1e7
      ? v.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })
      : v.toExponential(1));
    const across = ticks(x0, x1, Math.max(2, Math.min(8, width / 55)))
      .filter((v) => Number.isInteger(Math.round(v * 1e9) / 1e9));
    this.svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img" },
      marks.map((v) => [this.level(v, "grid"),
        s("text", { x: left - 6, y: this.y(v) + 4, "text-anchor": "end" }, written(v))]),
      across.map((v) => s("text", { x: this.x(v), y: bottom + 15, "text-anchor": "middle" }, v)),
      s("text", { x: (left + right) / 2, y: HEIGHT - 4, "text-anchor": "middle", class: "axis" }, label));
    this.top = top;
    this.bottom = bottom;
  }

  path(xs, ys) {
    let pen = "M";
    return xs.map((x, i) => {
      if (!finite(ys[i])) {
        pen = "M";
        return "";
      }
      const point = `${pen}${this.x(x).toFixed(1)},${this.y(ys[i]).toFixed(1)}`;
      pen = "L";
      return point;
    }).join("");
  }
}

const range = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

const upright = (frame, x, kind) =>
  s("line", { class: kind, x1: frame.x(x), x2: frame.x(x), y1: frame.top, y2: frame.bottom });

/** One line per series `{name, x, y}`; `band` shades between two; `limits` are drawn where they are near; `at`
    marks an x. */
function drawLines(width, series, { label, limits = [], band = null, at = null }) {
  const values = [...series, ...(band ?? [])].flatMap((one) => one.y).filter(finite);
  if (!values.length) return null;
  let [low, high] = range(values);
  const span = high - low || Math.abs(high);
  const near = limits.filter((v) => v >= low - span && v <= high + span);
  [low, high] = range([low, high, ...near]);
  const frame = new Frame(width, range(series.flatMap((one) => one.x)), [low, high], label);
  if (band?.[0].x.length) {
    const [floor, ceiling] = band;
    const back = frame.path([...floor.x].reverse(), [...floor.y].reverse()).replace(/M/g, "L");
    frame.svg.append(s("path", { class: "band", d: `${frame.path(ceiling.x, ceiling.y)}${back}Z` }));
  }
  near.forEach((v) => frame.svg.append(frame.level(v, "limit")));
  series.forEach((one, i) => {
    frame.svg.append(s("path", { class: `line ${colour(i)}`, d: frame.path(one.x, one.y) }));
    if (one.x.length <= 40) {
      frame.svg.append(...one.x.flatMap((x, k) => (finite(one.y[k])
        ? [s("circle", { class: colour(i), cx: frame.x(x), cy: frame.y(one.y[k]), r: 2.4 })] : [])));
    }
  });
  if (at !== null) frame.svg.append(upright(frame, at, "now"));
  return frame;
}

/** Series as columns over shared x; more columns than fit become means of several. */
function columns(series, most) {
  const xs = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const rows = series.map((one) => {
    const row = xs.map(() => 0);
    one.x.forEach((x, i) => { row[place.get(x)] = finite(one.y[i]) ? one.y[i] : 0; });
    return row;
  });
  const size = Math.ceil(xs.length / most);
  const starts = xs.filter((_, i) => i % size === 0);
  const mean = (row, i) => {
    const part = row.slice(i * size, (i + 1) * size);
    return part.reduce((a, b) => a + b, 0) / part.length;
  };
  return { xs: starts, rows: rows.map((row) => starts.map((_, i) => mean(row, i))), size };
}

/** One bar per x, its parts stacked, negative ones downwards; `total` marks their sum. */
function drawBars(width, series, { label, total = false }) {
  const { xs, rows, size } = columns(series, Math.floor(width / 4));
  if (!rows.some((row) => row.some((v) => v))) return null;
  const sum = (i, sign) => rows.reduce((a, row) => a + (row[i] * sign > 0 ? row[i] : 0), 0);
  const tops = xs.map((_, i) => sum(i, 1));
  const bottoms = xs.map((_, i) => sum(i, -1));
  const step = xs.length > 1 ? Math.min(...xs.slice(1).map((x, i) => x - xs[i])) : 1;
  const across = [xs[0] - step / 2, xs.at(-1) + step / 2];
  const frame = new Frame(width, across, [Math.min(0, ...bottoms), Math.max(0, ...tops)], label);
  const wide = Math.max(frame.x(xs[0] + step) - frame.x(xs[0]) - 1, 0.5);
  xs.forEach((x, i) => {
    const left = frame.x(x) - wide / 2;
    let [up, down] = [0, 0];
    rows.forEach((row, k) => {
      const start = row[i] > 0 ? up : down;
      if (row[i] > 0) up += row[i];
      else down += row[i];
      const [y1, y2] = [frame.y(start + row[i]), frame.y(start)].sort((a, b) => a - b);
      const bar = { x: left, y: y1, width: wide, height: y2 - y1 };
      if (row[i]) frame.svg.append(s("rect", { class: colour(k), ...bar }));
    });
    const y = frame.y(up + down);
    if (total) frame.svg.append(s("line", { class: "total", x1: left, x2: left + wide, y1: y, y2: y }));
  });
  frame.note = size > 1 ? `Each bar is the mean of ${size}.` : "";
  return frame;
}

/** A dot with its interval for each name, and a line at 0 if the range includes it. */
function drawIntervals(width, rows, { marked }) {
  const names = Object.keys(rows);
  const [left, row] = [Math.min(150, width * 0.38), 24];
  const height = row * names.length + 24;
  let [low, high] = range(names.flatMap((name) => rows[name]));
  const pad = 0.05 * (high - low) || 1;
  [low, high] = [low - pad, high + pad];
  const x = (v) => left + (v - low) / (high - low) * (width - MARGIN.right - left);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" },
    ticks(low, high, Math.max(2, width / 110)).map((v) => [
      s("line", { class: Math.abs(v) < 1e-12 ? "limit" : "grid", x1: x(v), x2: x(v), y1: 0, y2: height - 20 }),
      s("text", { x: x(v), y: height - 6, "text-anchor": "middle" }, number(v))]),
    names.map((name, i) => {
      const [value, from, to] = rows[name];
      const y = row * i + row / 2;
      return s("g", {}, s("title", {}, `${name}: ${interval(rows[name])}`),
        s("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, name),
        s("line", { class: "total", x1: x(from), x2: x(to), y1: y, y2: y }),
        s("circle", { class: name === marked ? "c1" : "c0", cx: x(value), cy: y, r: 5 }));
    }));
  return { svg };
}

/** The seeds of one network: a lane per slot, stages as bands, alpha as a line from 0 to 1. */
function drawLanes(width, slots, { epochs, at = null }) {
  const names = Object.keys(slots);
  const [lane, left] = [40, Math.min(110, 14 + 7 * Math.max(...names.map((name) => name.length), 5))];
  const [height, per] = [lane * names.length + 20, (width - MARGIN.right - left) / Math.max(epochs, 1)];
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" },
    s("text", { x: left - 6, y: height - 5, "text-anchor": "end" }, "epoch"),
    ticks(0, epochs, Math.max(2, width / 60)).filter((e) => e && Number.isInteger(e)).map((e) =>
      s("text", { x: left + e * per, y: height - 5, "text-anchor": "middle" }, e)));
  names.forEach((slot, row) => svg.append(s("g", {},
    s("text", { x: left - 6, y: row * lane + 25, "text-anchor": "end" }, s("title", {}, slot),
      slot.length > 13 ? `…${slot.slice(-12)}` : slot),
    drawLane(slots[slot], slot, { top: row * lane + 4, tall: lane - 4, left, per, epochs }))));
  if (at !== null) {
    const x = left + (at - 0.5) * per;
    svg.append(s("line", { class: "now", x1: x, x2: x, y1: 0, y2: height - 18 }));
  }
  return { svg };
}

function drawLane(bands, slot, { top, tall, left, per, epochs }) {
  const place = (from, to) => ({ x: left + (from - 1) * per, y: top, width: (to - from + 1) * per, height: tall });
  const rects = bands.map((band) => s("rect", { class: band.stage, ...place(band.from, band.to) },
    s("title", {}, `${slot}: ${band.blueprint ?? "unknown"} ${band.stage}, epochs ${band.from} to ${band.to}`)));
  // A gap in the epochs ends a seed: the next one may be of the same blueprint.
  const seeds = [];
  bands.forEach((band, i) => {
    if (bands[i - 1]?.born === band.born && bands[i - 1].to === band.from - 1) seeds.at(-1).push(band);
    else seeds.push([band]);
  });
  const marks = seeds.map((seed) => {
    const x = left + (seed[0].from - 1) * per;
    const points = seed.flatMap((band) => band.alpha).map((alpha, k) =>
      `${(x + (k + 0.5) * per).toFixed(1)},${(top + tall - 2 - (alpha ?? 0) * (tall - 4)).toFixed(1)}`);
    const late = x > left + epochs * per - 80;
    return [s("path", { class: "alpha", d: `M${points.join("L")}` }),
      s("text", { class: "blueprint", y: top + 13, x: late ? left + epochs * per : x + 3,
        "text-anchor": late ? "end" : "start" }, seed[0].blueprint ?? "unknown")];
  });
  return [s("rect", { class: "DORMANT", ...place(1, epochs) }), rects, marks];
}

const DRAW = { lines: drawLines, bars: drawBars, intervals: drawIntervals, lanes: drawLanes };

/** Shows the values at the pointer's x, which follows the points. */
function addTip(frame, holder, series) {
  const xs = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const cursor = upright(frame, xs[0], "cursor");
  const tip = h("div", { class: "tip" });
  frame.svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - frame.svg.getBoundingClientRect().left;
    const away = (v) => Math.abs(frame.x(v) - at);
    const x = xs.reduce((best, v) => (away(v) < away(best) ? v : best), xs[0]);
    cursor.setAttribute("x1", frame.x(x));
    cursor.setAttribute("x2", frame.x(x));
    const values = series.map((one) => [one.name, one.y[one.x.indexOf(x)] ?? null]);
    tip.replaceChildren(h("b", {}, number(x)),
      ...values.map(([name, v]) => h("div", {}, `${name}  ${number(v)}`)));
    frame.svg.append(cursor);
    holder.append(tip);
  });
  frame.svg.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}

const charts = new WeakMap();
const inView = new IntersectionObserver((entries) => entries.forEach((entry) => {
  const chart = charts.get(entry.target);
  chart.seen = entry.isIntersecting;
  chart.draw();
}), { rootMargin: "200px" });
const resized = new ResizeObserver((entries) => entries.forEach((entry) => charts.get(entry.target).resize()));

/** A figure with a title, a note and a chart that is drawn again whenever its data or its width changes. */
export class Chart {
  constructor({ type, title, note = "", ...options }) {
    Object.assign(this, { type, options, seen: false, stale: false, width: 0, series: [] });
    this.holder = h("div", { class: `chart ${type}` });
    this.legend = h("div", { class: "legend" });
    this.extra = h("span");
    this.element = h("figure", { "data-title": title },
      h("figcaption", {}, h("b", {}, title), " ", note, " ", this.extra), this.holder, this.legend);
    charts.set(this.holder, this);
    inView.observe(this.holder);
    resized.observe(this.holder);
  }

  set(series, options = {}) {
    this.series = series;
    Object.assign(this.options, options);
    this.stale = true;
    this.draw();
  }

  resize() {
    if (this.holder.clientWidth !== this.width) this.stale = true;
    this.draw();
  }

  draw() {
    const width = this.holder.clientWidth;
    if (!this.stale || !this.seen || !width) return;
    Object.assign(this, { stale: false, width });
    const frame = DRAW[this.type](width, this.series, this.options);
    this.holder.replaceChildren(frame?.svg ?? h("p", { class: "absent" }, "not measured"));
    this.extra.textContent = frame?.note ?? "";
    if (!frame?.x) return;
    addTip(frame, this.holder, this.series);
    const last = this.series.map((one) => `${one.name}: last ${number(one.y.at(-1))}`);
    frame.svg.setAttribute("aria-label", last.join("; "));
    // Series that show nothing keep their colour and are not listed.
    const keys = this.series.map((one, i) => [one.name, colour(i), one.y.some((v) => v)]);
    if (this.options.total) keys.push(["sum", "sum", true]);
    this.legend.replaceChildren(...(this.series.length > 1 ? keys : []).filter(([, , some]) => some)
      .map(([name, css]) => h("span", {}, h("i", { class: css }), name)));
  }
}
