// Elements of the page. Texts of records become text nodes, never markup, and are bounded.
const SVG = "http://www.w3.org/2000/svg";
// Control characters, and those that turn the direction of text, could disguise a name.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const MAX_CHARS = 300;

const seen = (value) => String(value).replace(UNSEEN, "\ufffd");

export function clean(value) {
  const text = seen(value);
  return text.length > MAX_CHARS ? `${text.slice(0, MAX_CHARS)}…` : text;
}

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "onclick" || name === "onchange") node[name] = value;
    else if (name === "width%") node.dataset.width = value;
    else node.setAttribute(name, value === true ? "" : seen(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
  return node;
}

export const h = (name, attributes, ...children) => made(document.createElement(name), attributes, children);
export const s = (name, attributes, ...children) => made(document.createElementNS(SVG, name), attributes, children);

// Change `old` into `wanted` in place, so that focus, selection and scroll positions stay.
export function patch(old, wanted) {
  const before = [...old.childNodes];
  const after = [...wanted.childNodes];
  const keyed = new Map(before.filter((n) => n.dataset?.key).map((n) => [n.dataset.key, n]));
  let place = old.firstChild;
  for (const next of after) {
    const key = next.dataset?.key;
    let same = key ? keyed.get(key) : place;
    if (same && (same.nodeName !== next.nodeName || (!key && same.dataset?.key))) same = undefined;
    if (!same) {
      old.insertBefore(next, place);
      applyWidths(next);
      continue;
    }
    if (same !== place) old.insertBefore(same, place);
    else place = place.nextSibling;
    if (same.nodeType === Node.TEXT_NODE) {
      if (same.data !== next.data) same.data = next.data;
      continue;
    }
    for (const { name } of [...same.attributes]) {
      if (!next.hasAttribute(name) && name !== "style" && !(name === "open" && same.nodeName === "DETAILS")) same.removeAttribute(name);
    }
    for (const { name, value } of next.attributes) if (same.getAttribute(name) !== value) same.setAttribute(name, value);
    same.onclick = next.onclick;
    same.onchange = next.onchange;
    patch(same, next);
    setWidth(same);
  }
  while (place) {
    const gone = place;
    place = place.nextSibling;
    gone.remove();
  }
}

// The policy of the page forbids style attributes; properties set by a script are allowed.
function setWidth(node) {
  if (node.dataset?.width !== undefined) node.style.width = `${node.dataset.width}%`;
}

function applyWidths(node) {
  setWidth(node);
  for (const each of node.querySelectorAll?.("[data-width]") ?? []) setWidth(each);
}

// --- numbers ---

export const number = (value, digits = 0) =>
  value === undefined || value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
export const share = (value) => (value === undefined || value === null ? "–" : `${Math.round(value * 100)} %`);
export function duration(ms) {
  if (ms === undefined || ms === null) return "–";
  if (ms === 0) return "0";
  if (ms < 1) return `${number(ms, 2)} ms`;
  if (ms < 1000) return `${number(ms, ms < 10 ? 1 : 0)} ms`;
  if (ms < 60_000) return `${number(ms / 1000, ms < 10_000 ? 2 : 1)} s`;
  if (ms < 3_600_000) return `${number(ms / 60_000, 1)} min`;
  return `${number(ms / 3_600_000, 1)} h`;
}
export const clock = (ms) => (ms ? new Date(ms).toISOString().slice(11, 19) : "–");
export const day = (ms) => (ms ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") : "–");

// --- parts ---

const TONES = {
  ready: "good", completed: "good", stop: "good", length: "good", decode: "good", seen: "good",
  starting: "warn", draining: "warn", queued: "warn", assigned: "warn", prefill: "warn", cancelled: "warn",
  cordoned: "warn", evacuating: "warn", validating: "warn", in_progress: "warn", finalizing: "warn", cancelling: "warn",
  unhealthy: "bad", silent: "bad", lost: "bad", error: "bad", failed: "bad", expired: "bad", broken: "bad",
};
export const pill = (text, tone) => h("span", { class: `pill ${tone ?? TONES[text] ?? ""}` }, text || "–");

export function bar(part, text) {
  if (part === null || part === undefined) return h("span", { class: "soft" }, "–");
  const tone = part > 0.95 ? "bad" : part > 0.85 ? "warn" : "";
  return h("span", { class: "n" },
    h("span", { class: "bar", "aria-hidden": "true" }, h("i", { class: tone, "width%": Math.min(100, part * 100).toFixed(1) })), text ?? share(part));
}

// A table. Columns: [title, cell of a row, class]; `open`: what a row opens, which makes rows choosable.
export function table(columns, rows, { key, open, selected, empty = "none", label } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const body = rows.map((row) => {
    const id = key ? key(row) : undefined;
    const cells = columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row)));
    const chosen = selected !== undefined && id === selected;
    return open
      ? h("tr", { class: "row", "data-key": id, tabindex: chosen ? "0" : "-1", "aria-selected": String(chosen), onclick: () => open(row) }, cells)
      : h("tr", { "data-key": id }, cells);
  });
  if (open && !body.some((tr) => tr.tabIndex === 0)) body[0].tabIndex = 0;
  const head = h("tr", {}, columns.map(([title, , kind]) => h("th", { class: kind === "n" ? "n" : undefined, scope: "col" }, title)));
  return h("div", { class: "scroll" }, h("table", { role: open ? "grid" : undefined, "aria-label": label }, h("thead", {}, head), h("tbody", {}, body)));
}

export const section = (title, note, ...children) =>
  h("section", {}, h("h2", {}, title, note && h("small", {}, note)), children);

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== undefined && value !== null && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function fieldList(fields) {
  const shown = Object.entries(fields).map(([name, value]) =>
    h("span", {}, h("em", {}, name), typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? number(value, Number.isInteger(value) ? 0 : 1) : value));
  return h("div", { class: "fields mono" }, shown);
}
