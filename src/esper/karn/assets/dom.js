// Elements, and how values are written. Text from a run only ever becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : visible(child))));
  return element;
}

/** An HTML element. Attributes that are functions listen to the event of their name. */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Text with control and direction characters made visible, as \u{1b} for ESC: names may come from anyone. */
export const visible = (value) =>
  String(value).replace(/[\p{C}]/gu, (c) => (c === "\n" ? c : `\\u{${c.codePointAt(0).toString(16)}}`));

/** A value as people read it. */
export function number(value) {
  if (value === null || value === undefined) return "—";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.map(number).join(", ") || "—";
  if (typeof value === "object") return number(Object.entries(value).map(([k, v]) => `${k} ${number(v)}`));
  if (typeof value !== "number") return String(value);
  const rounded = Math.round(value) + 0; // no −0
  if (rounded === value || Math.abs(value) >= 1000) return rounded.toLocaleString("en-US");
  if (Math.abs(value) < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** A share as a percentage. */
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

/** Seconds as 1:02:03. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "—";
  const whole = Math.round(seconds);
  const pad = (n) => String(n).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

/** A value with its 95 % interval. */
export const interval = ([value, low, high]) => `${number(value)} [${number(low)}, ${number(high)}]`;

/** A table of rows that are objects. Numbers are aligned right; elements stay as they are. */
export function table(rows, heads = Object.keys(rows[0] ?? {})) {
  const side = (head) => (rows.some((row) => typeof row[head] === "number") ? "n" : null);
  const cell = (row, head) => h("td", { class: typeof row[head] === "string" ? null : side(head) },
    row[head] instanceof Node ? row[head] : number(row[head]));
  const title = (head) => h("th", { scope: "col", class: side(head) }, head.replaceAll("_", " "));
  return h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map(title))),
    h("tbody", {}, rows.map((row) => h("tr", {}, heads.map((head) => cell(row, head)))))));
}

/** A link to a view of this page. */
export const href = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

export const stage = (name) => h("span", { class: `stage ${name}` }, name.toLowerCase());
